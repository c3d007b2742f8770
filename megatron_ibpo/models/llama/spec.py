"""Llama's layers."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.spec import Backend, attention, dense_mlp, transformer_layer


def layer_spec(shape: ModelShape, layer: int, backend: Backend) -> ModuleSpec:
    mixer = attention(backend, norms=shape.query_key_norms, output_bias=shape.attention_output_bias)
    return transformer_layer(mixer, dense_mlp(backend, bias=shape.mlp_bias))


def config_fields(shape: ModelShape) -> dict[str, Any]:
    return {"qk_layernorm": shape.query_key_norms, "add_qkv_bias": shape.qkv_bias}
