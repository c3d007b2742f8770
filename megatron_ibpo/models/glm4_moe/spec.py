"""GLM-4.5's layers."""

from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ibpo.models.glm4_moe.shape import Glm4MoeShape
from megatron_ibpo.models.spec import Backend, attention, dense_mlp, moe, transformer_layer


class FrozenBiasRouter(TopKRouter):
    """A router whose correction never changes. (An update rate of 0 would turn -0.0 into 0.0.)"""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True


def layer_spec(shape: Glm4MoeShape, layer: int, backend: Backend) -> ModuleSpec:
    mlp = moe(shape, backend, FrozenBiasRouter) if shape.has_experts(layer) else dense_mlp(backend)
    return transformer_layer(attention(backend, norms=shape.query_key_norms), mlp)


def config_fields(shape: Glm4MoeShape) -> dict[str, Any]:
    return {
        "qk_layernorm": shape.query_key_norms,
        "add_qkv_bias": shape.qkv_bias,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": shape.routed_scaling_factor,
    }
