"""Dimensions of Qwen3 mixtures of experts."""

from __future__ import annotations

from megatron_ibpo.models.shape import Fields, ModelShape, common_fields, expert_fields


def read(fields: Fields) -> ModelShape:
    return ModelShape(**common_fields(fields), **expert_fields(fields, normalized=False))
