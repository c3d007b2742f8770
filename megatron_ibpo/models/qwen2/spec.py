"""Qwen2's layers."""

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.spec import Backend, attention, dense_mlp, transformer_layer


def layer_spec(shape: ModelShape, layer: int, backend: Backend) -> ModuleSpec:
    return transformer_layer(attention(backend, norms=False), dense_mlp(backend))


def config_fields(shape: ModelShape) -> dict[str, Any]:
    return {"qk_layernorm": False, "add_qkv_bias": True}
