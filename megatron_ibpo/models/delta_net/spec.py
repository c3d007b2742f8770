"""A layer: attention or a gated delta net, and a dense MLP or experts.

| part                           | on GPUs                                     | local               |
|--------------------------------|---------------------------------------------|---------------------|
| gated delta net                | FlashGatedDeltaNet (flash-linear-attention) | PackedGatedDeltaNet |
| norm of the delta net's output | TEGatedNorm (Transformer Engine)            | GatedNorm           |
"""

from typing import Any

from megatron_ibpo.models import spec
from megatron_ibpo.models.delta_net.shape import DeltaNetShape


def layer_spec(shape: DeltaNetShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    mixer = spec.attention(backend) if shape.full_attention[layer] else _gated_delta_net(backend)
    return spec.transformer_layer(mixer, _mlp(shape, backend))


def mtp_layer_spec(shape: DeltaNetShape, backend: spec.Backend) -> spec.LayerSpec:
    """Return the decoder layer inside the multi-token prediction layer: always attention."""
    return spec.transformer_layer(spec.attention(backend), _mlp(shape, backend))


def _mlp(shape: DeltaNetShape, backend: spec.Backend) -> spec.MLPAndNorm:
    return spec.moe(shape, backend) if shape.is_moe else spec.dense_mlp(backend)


def _gated_delta_net(backend: spec.Backend) -> spec.LayerSpec:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ibpo.models.delta_net import layer

    libraries = backend.libraries
    return ModuleSpec(
        module=layer.FlashGatedDeltaNet if libraries.flash_linear_attention else layer.PackedGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.norm_column_linear,
            out_norm=layer.TEGatedNorm if libraries.transformer_engine else layer.GatedNorm,
            out_proj=backend.row_linear,
        ),
    )


def megatron_fields(shape: DeltaNetShape) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [0 if full else 1 for full in shape.full_attention],
        "linear_conv_kernel_dim": shape.gdn_conv_kernel,
        "linear_key_head_dim": shape.gdn_key_dim,
        "linear_value_head_dim": shape.gdn_value_dim,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
    }
