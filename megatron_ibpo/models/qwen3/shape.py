"""Dense Qwen3's dimensions."""

from __future__ import annotations

from megatron_ibpo.models.shape import Fields, ModelShape, common_fields


def read(fields: Fields) -> ModelShape:
    return ModelShape(**common_fields(fields), ffn_hidden_size=fields.count("intermediate_size"))
