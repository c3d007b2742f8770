"""--vllm-arg: any argument of vLLM's EngineArgs by its name, checked before anything starts.

The names and types are read from vLLM's source text: importing vLLM takes seconds and changes threads and
environment of the process that does it.
"""

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ibpo.config import nearest

OURS = {
    "model": "--hf-checkpoint",
    "dtype": "--vllm-dtype",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "max_model_len": "--rollout-max-context-len",
    "max_num_seqs": "--vllm-max-num-seqs",
    "kv_cache_memory_bytes": "--vllm-kv-cache-bytes",
    "gpu_memory_utilization": "--vllm-gpu-memory-utilization",
    "enforce_eager": "--vllm-enforce-eager",
    "enable_sleep_mode": "--colocate",
    "seed": "--seed",
    "enable_prefix_caching": None,
    "skip_tokenizer_init": None,
    "logprobs_mode": None,
    "disable_log_stats": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
}
"""What every engine is given anyway → the flag that sets it; None: it follows from the rest."""

SCALARS: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


def vllm_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """The values of --vllm-arg name=value, by name and with the type that vLLM declares: text, a number or a
    truth value; of other types, what YAML makes of it.

    Raises:
        ValueError: no such argument, one that this project sets itself, or a value of another type.
    """
    if not pairs:
        return {}
    known = _declared()
    return dict(_argument(pair, known) for pair in pairs)


def _argument(pair: str, known: dict[str, str]) -> tuple[str, Any]:
    given, equals, text = pair.partition("=")
    name = given.strip().lstrip("-").replace("-", "_")
    if not equals:
        raise ValueError(f"--vllm-arg {pair}: write it as name=value")
    if name in OURS:
        instead = f"use {OURS[name]}" if OURS[name] else "it follows from the model and the device"
        raise ValueError(f"--vllm-arg {name}: this project sets it; {instead}")
    if name not in known:
        raise ValueError(f"--vllm-arg {name}: vLLM's EngineArgs has no such field{nearest(name, known)}")
    try:
        return name, _convert(text, known[name])
    except (ValueError, yaml.YAMLError):
        raise ValueError(f"--vllm-arg {name}={text}: vLLM wants {known[name]}") from None


def _convert(text: str, declared: str) -> Any:
    """`text` as a value of the declared type, such as "int | None"."""
    options = [option.strip() for option in declared.split("|")]
    if "None" in options and text.lower() in ("none", "null"):
        return None
    types = [option for option in options if option != "None"]
    value = yaml.safe_load(text)
    if not set(types) <= set(SCALARS):
        return value  # vLLM's own types: it checks them itself
    for name in types:
        if type(value) is SCALARS[name]:
            return value
    if "float" in types:
        return float(text)
    if "str" in types:
        return text
    raise ValueError


def _declared() -> dict[str, str]:
    """Field → type, as text, of vLLM's EngineArgs."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ValueError("--vllm-arg needs vLLM, which is not installed here")
    source = Path(found.origin).parent / "engine/arg_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            return {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    raise ValueError(f"{source} defines no EngineArgs: this project works with the pinned version of vLLM")
