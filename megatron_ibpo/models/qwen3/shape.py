"""Qwen3's dimensions."""

from megatron_ibpo.models.shape import Fields, ModelShape, common_fields, expert_fields


def read(fields: Fields) -> ModelShape:
    if fields.raw["model_type"] == "qwen3_moe":
        return ModelShape(**common_fields(fields), **expert_fields(fields, normalized=False))
    return ModelShape(**common_fields(fields), ffn_hidden_size=fields.count("intermediate_size"))
