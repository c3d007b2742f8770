"""Export of adapters as a directory that PEFT loads, `adapter_model.safetensors` and `adapter_config.json`;
and the comparison of a checkpoint's adapters with a run's: same rank, scale, targets and base."""

import hashlib
import json
import re
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.lora import EXPERTS, Lora, adapted, chosen_lora, pairs, target_of
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights.layout.export import HFExport
from megatron_ibpo.weights.weight_errors import CheckpointError

DIRECTORY = "adapter"
"""Directory of the adapter in a checkpoint or an export."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_EXPERT = re.compile(rf"(.*\.{EXPERTS})\.(\w+)\.(\d+)\.(lora_[AB])\.weight$")
_WRAPPED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Wrapper suffixes: PEFT wraps a module once per tensor with an adapter, in the order of these."""
_RENAMED = ("gate_proj", "up_proj", "down_proj")
"""Names that PEFT 0.21, in a mixture of experts, takes for the experts' names from before transformers 5
fused them, even if they are a shared expert's."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model under training."""

    export: HFExport
    """Export with `lora_entries`."""
    shape: ModelShape
    lora: Lora
    base: Path
    """Directory of the base model."""


def save_peft(adapters: Adapters, directory: Path) -> None:
    """Write the adapters to `directory`, which must not exist, from rank 0. Collective. Raises OSError on
    rank 0, after all ranks have done their part."""
    factors = {name: tensor.cpu() for name, tensor in adapters.export if tensor is not None}
    if factors:
        directory.mkdir()
        tensors = {f"base_model.model.{name}": tensor for name, tensor in _stacked(factors).items()}
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(peft_config(adapters.shape, adapters.lora, adapters.base), indent=2)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def peft_config(shape: ModelShape, lora: Lora, base: Path) -> dict[str, Any]:
    """Return PEFT's `LoraConfig` of the adapters."""
    as_tensors = {*(_RENAMED if shape.is_moe else ()), EXPERTS}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [name for name in lora.targets if name not in as_tensors],
        "target_parameters": _tensors(shape, lora, as_tensors) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _tensors(shape: ModelShape, lora: Lora, targets: Container[str]) -> list[str]:
    """Return the name endings, after the layer's name, of targets that PEFT must find as a module's tensors,
    not as modules."""
    endings = set()
    for entry in weight_map(shape).values():
        for pair in pairs(entry, lora):
            piece = adapted(entry)[pair.number]
            if target_of(piece) in targets:
                tensor = piece.name.removesuffix(f".{entry.expert}.weight")
                endings.add(re.sub(r".*\.layers\.\d+\.", "", tensor))
    return sorted(endings)


def _stacked(factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors by PEFT's names. PEFT keeps the factors of a layer's experts in one tensor: A with
    the experts' rows one after another, B with all experts' first columns before their second ones."""
    stacked: dict[str, Tensor] = {}
    experts: dict[tuple[str, str], list[Tensor]] = {}
    for name, factor in factors.items():
        if match := _EXPERT.match(name):
            module, tensor, _, kind = match.groups()
            experts.setdefault((f"{module}{_WRAPPED[tensor]}.{kind}.weight", kind), []).append(factor)
        else:
            stacked[name] = factor.contiguous()
    for (name, kind), expert_factors in experts.items():
        stacked[name] = (
            torch.cat(expert_factors) if kind == "lora_A" else torch.stack(expert_factors, dim=-1).flatten(1)
        )
    return stacked


BLOCKS, BLOCK_BYTES = 256, 64 * 1024
"""Number and size of the evenly spaced blocks that are hashed of a weight file; a small file is read
whole."""


def describe_adapters(model: ModelConfig) -> dict[str, Any] | None:
    """Return the description of a run's adapters for `layout.json`; None if it has none. Raises ConfigError
    for a target that the model lacks."""
    if model.lora_rank is None or model.hf_checkpoint is None:
        return None
    lora = chosen_lora(model, read_hf_config(model.hf_checkpoint))
    assert lora is not None
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": list(lora.targets),
        "base": str(model.hf_checkpoint),
        "base_digest": weights_digest(model.hf_checkpoint),
    }


def check_same_adapters(saved: Any, model: ModelConfig, checkpoint: Path) -> None:
    """Refuse to resume with adapters other than the checkpoint's.

    Args:
        saved: entry "lora" of the checkpoint's `layout.json`.

    Raises:
        CheckpointError: training cannot resume with these adapters; says what differs.
    """
    present = describe_adapters(model)
    if saved is None and present is None:
        return
    if present is None:
        raise CheckpointError(
            f"--load {checkpoint}: holds adapters only; resume with its --lora-rank, or start from a "
            "merged export"
        )
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"--load {checkpoint}: holds weights and no adapters; convert it to Hugging Face format and give "
            "that as --hf-checkpoint, or drop --lora-rank"
        )
    flags = {"rank": "--lora-rank", "alpha": "--lora-alpha", "targets": "--lora-targets"}
    for name, flag in flags.items():
        if saved.get(name) != present[name]:
            raise CheckpointError(
                f"--load {checkpoint}: its adapters have {flag} {_format_value(saved.get(name))}, this run "
                f"{_format_value(present[name])}; resume with the same"
            )
    if saved.get("base_digest") != present["base_digest"]:
        raise CheckpointError(
            f"--load {checkpoint}: its adapters belong to the weights that were in {saved.get('base')}, "
            f"but --hf-checkpoint {model.hf_checkpoint} has others"
        )


def _format_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@lru_cache(maxsize=1)  # called for every checkpoint of a run
def weights_digest(hf_dir: Path) -> str:
    """Return a hash that identifies a model's weights, from their files' sizes and evenly spaced blocks.
    Names and places of files do not count, and a change between those blocks goes unseen."""
    digests = sorted(
        _file_digest(path) for path in hf_dir.iterdir() if path.suffix in (".safetensors", ".bin")
    )
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    step = max(BLOCK_BYTES, size // BLOCKS)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
