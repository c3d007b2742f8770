"""The mixer of a layer: attention, or a gated delta net.

| part                           | on GPUs                                     | local               |
|--------------------------------|---------------------------------------------|---------------------|
| gated delta net                | FlashGatedDeltaNet (flash-linear-attention) | PackedGatedDeltaNet |
| norm of the delta net's output | TEGatedNorm (Transformer Engine)            | GatedNorm           |
"""

import copy
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ibpo.models.delta_net.layer import FlashGatedDeltaNet, PackedGatedDeltaNet
from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.local_modules import RMSNorm
from megatron_ibpo.models.spec import Backend, attention, dense_mlp, moe, transformer_layer


class GatedNorm(RMSNorm):
    """The norm of a gated delta net's output. It is never zero-centred, unlike the other norms of these
    models: its checkpoint value is copied unchanged (subtracting one would lose bits)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__(config, hidden_size, eps)
        self.zero_centered_gamma = False


class TEGatedNorm:
    """The same as a TENorm."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> Any:
        from megatron.core.extensions.transformer_engine import TENorm

        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        return TENorm(config, hidden_size, eps)


def mixer(shape: DeltaNetShape, layer: int, backend: Backend) -> ModuleSpec:
    return attention(backend) if shape.full_attention[layer] else _gated_delta_net(backend)


def mtp_layer_spec(shape: DeltaNetShape, backend: Backend) -> ModuleSpec:
    """Return the decoder layer inside the multi-token prediction layer: always attention."""
    return transformer_layer(attention(backend), moe(shape, backend) if shape.is_moe else dense_mlp(backend))


def _gated_delta_net(backend: Backend) -> ModuleSpec:
    libraries = backend.libraries
    return ModuleSpec(
        module=FlashGatedDeltaNet if libraries.flash_linear_attention else PackedGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.norm_column_linear,
            out_norm=TEGatedNorm if libraries.transformer_engine else GatedNorm,
            out_proj=backend.row_linear,
        ),
    )


def config_fields(shape: DeltaNetShape) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [0 if full else 1 for full in shape.full_attention],
        "linear_conv_kernel_dim": shape.gdn_conv_kernel,
        "linear_key_head_dim": shape.gdn_key_dim,
        "linear_value_head_dim": shape.gdn_value_dim,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
    }
