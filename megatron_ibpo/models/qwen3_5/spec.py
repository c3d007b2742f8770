"""Qwen3.5's layers: attention or a gated delta net, and a dense MLP or experts."""

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.delta_net.spec import config_fields, mixer, mtp_layer_spec
from megatron_ibpo.models.spec import Backend, dense_mlp, moe, transformer_layer

__all__ = ["config_fields", "layer_spec", "mtp_layer_spec"]


def layer_spec(shape: DeltaNetShape, layer: int, backend: Backend) -> ModuleSpec:
    mlp = moe(shape, backend) if shape.is_moe else dense_mlp(backend)
    return transformer_layer(mixer(shape, layer, backend), mlp)
