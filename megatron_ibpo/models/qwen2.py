"""Qwen2 and Qwen2.5, dense (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct): a Llama whose projections to
queries, keys and values have biases. Qwen Team, "Qwen2.5 Technical Report", 2024."""

from typing import Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import Entry


def read(fields: Fields) -> ModelShape:
    heads = fields.count("num_attention_heads")
    return ModelShape(
        **common_fields(fields, head_dim=fields.count("hidden_size") // heads),
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
