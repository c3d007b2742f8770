"""Export of adapters as a directory that PEFT loads: `adapter_model.safetensors` and
`adapter_config.json`."""

import json
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.lora import EXPERTS, Lora, adapted, pairs, target_of
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights.layout.export import HFExport

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
    """Write the adapters to `directory`, which must not exist, from rank 0. Collective.

    Raises:
        OSError: on rank 0, after all ranks have done their part.
    """
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
