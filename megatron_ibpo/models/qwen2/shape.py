"""Qwen2's dimensions."""

from megatron_ibpo.models.shape import Fields, ModelShape, common_fields


def read(fields: Fields) -> ModelShape:
    heads = fields.count("num_attention_heads")
    return ModelShape(
        **common_fields(fields, head_dim=fields.count("hidden_size") // heads),
        ffn_hidden_size=fields.count("intermediate_size"),
        query_key_norms=False,
        qkv_bias=True,
    )
