"""gpt-oss's layers."""

from typing import Any

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ibpo.models.gpt_oss.shape import LIMIT
from megatron_ibpo.models.shape import ModelShape
from megatron_ibpo.models.spec import Backend, attention, moe, transformer_layer


def layer_spec(shape: ModelShape, layer: int, backend: Backend) -> ModuleSpec:
    return transformer_layer(attention(backend, norms=False), moe(shape, backend))


def config_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "qk_layernorm": False,
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": LIMIT,
    }
