"""Llama's dimensions."""

from megatron_ibpo.models.shape import Fields, ModelShape, common_fields


def read(fields: Fields) -> ModelShape:
    heads = fields.count("num_attention_heads")
    attention_bias = fields.flag("attention_bias", False)
    return ModelShape(
        **common_fields(fields, head_dim=fields.count("hidden_size") // heads, may_have_biases=True),
        ffn_hidden_size=fields.count("intermediate_size"),
        query_key_norms=False,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
