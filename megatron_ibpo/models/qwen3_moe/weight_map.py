"""Tensors of Qwen3 mixtures of experts."""

from __future__ import annotations

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.weight_map import Rule
from megatron_ibpo.models.weight_rules import attention, moe


def layer_rules(shape: ModelShape, layer: int) -> list[Rule]:
    return [*attention(shape), *moe(shape)]
