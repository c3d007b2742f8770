"""Which class computes what: layer specs for dense Qwen3, Qwen3 mixtures of experts, and Qwen3-Next.

One spec serves both back ends. They differ in classes only; parameter and checkpoint names are the same:

| part                          | Transformer Engine              | local                      |
|-------------------------------|---------------------------------|----------------------------|
| norm before attention, MLP    | fused into the linear layer     | fused into the linear layer |
| … with its linear layer       | TELayerNormColumnParallelLinear | NormColumnParallelLinear   |
| column, row linear            | TEColumn/RowParallelLinear      | Column/RowParallelLinear   |
| other norms                   | TENorm                          | RMSNorm                    |
| norm of the delta net's output | TEGatedNorm                    | GatedNorm                  |
| attention                     | SelfAttention with TEDotProductAttention | PackedSelfAttention |
| experts                       | TEGroupedMLP of TE grouped linears | TEGroupedMLP of local grouped linears |
| gated delta net               | GatedDeltaNet (flash-linear-attention), else ours | PackedGatedDeltaNet |

The optimizer's classes (fused Adam, multi-tensor norm and scale) are chosen by Megatron itself:
Transformer Engine's where installed, else apex's, else torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import HAVE_FLA, GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_ibpo.policy import local_modules
from megatron_ibpo.policy.gated_delta_net import PackedGatedDeltaNet
from megatron_ibpo.shape import ModelShape

__all__ = ["Backend", "block_spec", "local_backend", "transformer_engine_backend"]


@dataclass(frozen=True)
class Backend:
    """The classes a spec is made of."""

    norm: type
    gated_norm: type
    norm_column_linear: type
    column_linear: type
    row_linear: type
    attention: type
    core_attention: type
    gated_delta_net: type
    grouped_column_linear: type
    grouped_row_linear: type


def local_backend() -> Backend:
    return Backend(
        norm=local_modules.RMSNorm,
        gated_norm=local_modules.GatedNorm,
        norm_column_linear=local_modules.NormColumnParallelLinear,
        column_linear=ColumnParallelLinear,
        row_linear=RowParallelLinear,
        attention=local_modules.PackedSelfAttention,
        core_attention=local_modules.NoCoreAttention,
        gated_delta_net=PackedGatedDeltaNet,
        grouped_column_linear=local_modules.GroupedColumnLinear,
        grouped_row_linear=local_modules.GroupedRowLinear,
    )


def transformer_engine_backend() -> Backend:
    """Raises ImportError where Transformer Engine is not installed."""
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise ImportError("Transformer Engine is not installed")
    return Backend(
        norm=te.TENorm,
        gated_norm=TEGatedNorm,
        norm_column_linear=te.TELayerNormColumnParallelLinear,
        column_linear=te.TEColumnParallelLinear,
        row_linear=te.TERowParallelLinear,
        attention=SelfAttention,
        core_attention=te.TEDotProductAttention,
        gated_delta_net=GatedDeltaNet if HAVE_FLA else PackedGatedDeltaNet,
        grouped_column_linear=te.TEColumnParallelGroupedLinear,
        grouped_row_linear=te.TERowParallelGroupedLinear,
    )


class TEGatedNorm:
    """TENorm for the delta net's output, which alone is not zero-centred (see local GatedNorm)."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> Any:
        from megatron.core.extensions.transformer_engine import TENorm

        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        return TENorm(config, hidden_size, eps)


def block_spec(
    shape: ModelShape, backend: Backend, first_layer: int, layers: int
) -> TransformerBlockSubmodules:
    """The layers [first_layer, first_layer + layers) of the model, and its final norm."""
    mlp, mlp_norm = _moe(shape, backend) if shape.is_moe else _dense_mlp(backend)
    return TransformerBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=IdentityOp,  # fused into the mixer's first linear layer
                    self_attention=_attention(backend) if full_attention else _gated_delta_net(backend),
                    self_attn_bda=get_bias_dropout_add,
                    pre_mlp_layernorm=mlp_norm,
                    mlp=mlp,
                    mlp_bda=get_bias_dropout_add,
                ),
            )
            for full_attention in shape.full_attention[first_layer : first_layer + layers]
        ],
        layer_norm=backend.norm,
    )


def _attention(backend: Backend) -> ModuleSpec:
    return ModuleSpec(
        module=backend.attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.norm_column_linear,
            core_attention=backend.core_attention,
            linear_proj=backend.row_linear,
            q_layernorm=backend.norm,
            k_layernorm=backend.norm,
        ),
    )


def _gated_delta_net(backend: Backend) -> ModuleSpec:
    return ModuleSpec(
        module=backend.gated_delta_net,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.norm_column_linear,
            out_norm=backend.gated_norm,
            out_proj=backend.row_linear,
        ),
    )


def _dense_mlp(backend: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(MLP, norm before it): the norm is fused into the MLP's first linear layer."""
    submodules = MLPSubmodules(linear_fc1=backend.norm_column_linear, linear_fc2=backend.row_linear)
    return partial(MLP.as_mlp_submodule, submodules=submodules), IdentityOp


def _moe(shape: ModelShape, backend: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(mixture of experts, norm before it): router and experts share one normed input."""
    experts = partial(
        TEGroupedMLP,
        submodules=GroupedMLPSubmodules(
            linear_fc1=backend.grouped_column_linear, linear_fc2=backend.grouped_row_linear
        ),
    )
    shared = None
    if shape.shared_expert_hidden_size:
        shared = partial(
            SharedExpertMLP,
            submodules=MLPSubmodules(linear_fc1=backend.column_linear, linear_fc2=backend.row_linear),
        )
    return partial(MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared)), backend.norm
