"""Llama 2 and 3 (https://huggingface.co/meta-llama) and the many dense models of their form, such as SmolLM2
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). Grattafiori et al., "The Llama 3 Herd of
Models", 2024."""

from typing import Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import Entry

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
"""Defaults of `transformers`\' LlamaConfig; there are as many key/value heads as query heads."""


def read(fields: Fields) -> ModelShape:
    fields = fields.or_default(DEFAULTS)
    attention_bias = fields.flag("attention_bias", False)
    return ModelShape(
        **common_fields(fields, may_have_biases=True),
        ffn_hidden_size=fields.count("intermediate_size"),
        query_key_norms=False,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    return [*shared_entries.attention(shape), *shared_entries.dense_mlp(shape)]


def layer_spec(shape: ModelShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    mixer = spec.attention(backend, norms=shape.query_key_norms, output_bias=shape.attention_output_bias)
    return spec.transformer_layer(mixer, spec.dense_mlp(backend, bias=shape.mlp_bias))


def megatron_fields(shape: ModelShape) -> dict[str, Any]:
    return {"qk_layernorm": shape.query_key_norms, "add_qkv_bias": shape.qkv_bias}
