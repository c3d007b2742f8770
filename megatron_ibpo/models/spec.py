"""The layers' parts as Megatron's specs, which families share. Transformer Engine's classes or local ones
(`Backend`) give parameters and checkpoints the same names.

Megatron is imported by the functions that build something: families import this module for their shapes too.
Megatron itself chooses the optimizer's classes: Transformer Engine's, then apex's, then torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.shape import ModelShape

if TYPE_CHECKING:
    from megatron_ibpo.models.backends import Backends

LayerSpec = Any
"""Megatron's ModuleSpec, of a layer or of a part of one."""
MLPAndNorm = tuple[Callable[..., Any], Callable[..., Any]]
"""Class of a layer's MLP or experts, and class of the norm before it."""


@dataclass(frozen=True)
class Backend:
    """The classes from which a spec is made."""

    libraries: Backends
    norm: type
    norm_column_linear: type
    column_linear: type
    row_linear: type
    attention: type
    core_attention: type
    grouped_column_linear: type
    grouped_row_linear: type


def make_backend(libraries: Backends) -> Backend:
    """Return these libraries' classes. Raises ImportError if Transformer Engine is not installed."""
    return _transformer_engine(libraries) if libraries.transformer_engine else _local(libraries)


def _local(libraries: Backends) -> Backend:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_ibpo.models import local_modules

    return Backend(
        libraries=libraries,
        norm=local_modules.RMSNorm,
        norm_column_linear=local_modules.NormColumnParallelLinear,
        column_linear=ColumnParallelLinear,
        row_linear=RowParallelLinear,
        attention=local_modules.PackedSelfAttention,
        core_attention=local_modules.NoCoreAttention,
        grouped_column_linear=local_modules.GroupedColumnLinear,
        grouped_row_linear=local_modules.GroupedRowLinear,
    )


def _transformer_engine(libraries: Backends) -> Backend:
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.transformer.attention import SelfAttention

    if not te.HAVE_TE:
        raise ImportError("Transformer Engine is not installed")
    return Backend(
        libraries=libraries,
        norm=te.TENorm,
        norm_column_linear=te.TELayerNormColumnParallelLinear,
        column_linear=te.TEColumnParallelLinear,
        row_linear=te.TERowParallelLinear,
        attention=SelfAttention,
        core_attention=te.TEDotProductAttention,
        grouped_column_linear=te.TEColumnParallelGroupedLinear,
        grouped_row_linear=te.TERowParallelGroupedLinear,
    )


def block_spec(shape: ModelShape, backend: Backend, first_layer: int, layers: int) -> Any:
    """Return Megatron's TransformerBlockSubmodules for these layers and the final norm."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    family = family_module(shape.family)
    numbers = range(first_layer, first_layer + layers)
    return TransformerBlockSubmodules(
        layer_specs=[family.layer_spec(shape, layer, backend) for layer in numbers], layer_norm=backend.norm
    )


def transformer_layer(mixer: LayerSpec, mlp: MLPAndNorm) -> LayerSpec:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,  # fused into the mixer's first linear layer
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=mlp[1],
            mlp=mlp[0],
            mlp_bda=get_bias_dropout_add,
        ),
    )


def attention(backend: Backend, *, norms: bool = True, output_bias: bool = False) -> LayerSpec:
    """Return the spec of softmax attention. `norms` says whether queries and keys have norms."""
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(
        module=backend.attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.norm_column_linear,
            core_attention=backend.core_attention,
            linear_proj=_biased(backend.row_linear) if output_bias else backend.row_linear,
            q_layernorm=backend.norm if norms else None,
            k_layernorm=backend.norm if norms else None,
        ),
    )


def _biased(linear: type) -> Callable[..., Any]:
    """Return the layer with a bias; Megatron's add_bias_linear would give one to every linear layer."""

    def build(*args: Any, bias: bool, **kwargs: Any) -> Any:
        return linear(*args, bias=True, **kwargs)

    return build


def dense_mlp(backend: Backend, *, bias: bool = False) -> MLPAndNorm:
    """Return a dense MLP, with the norm fused into its first linear layer."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    linears = backend.norm_column_linear, backend.row_linear
    first, second = map(_biased, linears) if bias else linears
    submodules = MLPSubmodules(linear_fc1=first, linear_fc2=second)
    return partial(MLP.as_mlp_submodule, submodules=submodules), IdentityOp


def mlp(shape: ModelShape, backend: Backend) -> MLPAndNorm:
    """Return experts, or a dense MLP in a model without."""
    return moe(shape, backend) if shape.is_moe else dense_mlp(backend, bias=shape.mlp_bias)


def moe(shape: ModelShape, backend: Backend, router: Callable[..., Any] | None = None) -> MLPAndNorm:
    """Return a mixture of experts with one norm before router and experts; `router` makes the router."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

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
    submodules = MoESubmodules(experts=experts, shared_experts=shared, router=router or TopKRouter)
    return partial(MoELayer, submodules=submodules), backend.norm
