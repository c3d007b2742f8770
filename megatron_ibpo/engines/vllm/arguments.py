"""--vllm-arg: any argument of vLLM's EngineArgs by its name, checked before anything starts."""

from collections.abc import Sequence
from typing import Any

from megatron_ibpo.config.declared import declared_fields, declared_values

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
    "skip_tokenizer_init": None,
    "logprobs_mode": None,
    "disable_log_stats": None,
    "per_request_spec_decode_metrics": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "language_model_only": None,
    "enable_return_routed_experts": "--use-rollout-routing-replay",
}
"""Argument that every engine is given anyway → the flag that sets it; None: it follows from other
settings."""

FLAG = "--vllm-arg"


def vllm_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the values of --vllm-arg name=value by name, with the type that vLLM declares: text, a number, a
    truth value or a list. Values of vLLM's own types are parsed as YAML.

    Raises:
        ValueError: no such argument, one that this project sets itself, or a value of another type.
    """
    if not pairs:
        return {}
    try:
        known = declared_fields("vllm", "engine/arg_utils.py", "EngineArgs")
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None
    instead = {
        name: f"use {flag}" if flag else "it follows from the model and the device"
        for name, flag in OURS.items()
    }
    return declared_values(FLAG, pairs, known, instead, library="vLLM", of="EngineArgs")
