"""Qwen2 and Qwen2.5, dense (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct): a Llama whose projections to
queries, keys and values have biases. Qwen Team, "Qwen2.5 Technical Report", 2024."""

from typing import Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import Entry

DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
"""Defaults of `transformers`\' Qwen2Config."""


def read(fields: Fields) -> ModelShape:
    fields = fields.or_default(DEFAULTS)
    return ModelShape(
        **common_fields(fields),
        ffn_hidden_size=fields.count("intermediate_size"),
        query_key_norms=False,
        qkv_bias=True,
    )


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    return [*shared_entries.attention(shape), *shared_entries.dense_mlp(shape)]


def layer_spec(shape: ModelShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    return spec.transformer_layer(spec.attention(backend, norms=False), spec.dense_mlp(backend))


def megatron_fields(shape: ModelShape) -> dict[str, Any]:
    return {"qk_layernorm": False, "add_qkv_bias": True}
