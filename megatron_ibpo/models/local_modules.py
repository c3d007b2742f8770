"""Layers in plain torch, for machines without Transformer Engine. They take packed (thd) sequences, and use
the names of Transformer Engine's layers for their parameters and checkpoint entries."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide, get_pg_rank, get_pg_size
from torch import Tensor

from megatron_ibpo.models import fusion, packed, packed_attention, shared_prompts


def wide(x: Tensor) -> Tensor:
    """Return the tensor in float32; float64 is unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit_rows(x_BH: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows of root mean square 1 in float32, and the factor of each."""
    x = wide(x_BH)
    factor_B1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor_B1, factor_B1


def _weighted(unit_BH: Tensor, weight_H: Tensor, zero_centered: bool, dtype: torch.dtype) -> Tensor:
    if zero_centered:
        return (unit_BH * (1.0 + wide(weight_H))).to(dtype)
    return weight_H * unit_BH.to(dtype)


def rms_norm(x_BH: Tensor, weight_H: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Apply RMSNorm with float32 statistics, in transformers' order of operations."""
    return _weighted(_unit_rows(x_BH, eps)[0], weight_H, zero_centered, x_BH.dtype)


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` and its gradient, written out because autograd takes twice the time on CPUs: with u the unit
    row, r its factor and g the gradient of u, that of x is r (g - u mean(g u))."""

    @staticmethod
    def forward(ctx, x_BH, weight_H, eps, zero_centered):
        unit, factor = _unit_rows(x_BH, eps)
        ctx.save_for_backward(unit, factor, weight_H)
        ctx.zero_centered, ctx.dtype = zero_centered, x_BH.dtype
        return _weighted(unit, weight_H, zero_centered, x_BH.dtype)

    @staticmethod
    def backward(ctx, grad_BH):
        unit, factor, weight = ctx.saved_tensors
        scale = 1.0 + wide(weight) if ctx.zero_centered else wide(weight)
        grad = wide(grad_BH)
        products = grad * unit
        mean_B1 = (products @ scale).unsqueeze(-1) / len(scale)
        grad_x = (grad * scale).addcmul_(unit, mean_B1, value=-1.0).mul_(factor)
        grad_weight = products.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.to(ctx.dtype), grad_weight, None, None


compiled_rms_norm = fusion.Compiled(fusion.NORM, rms_norm, rows=(0,))


def norm_function(config: TransformerConfig) -> Callable[[Tensor, Tensor, float, bool], Tensor]:
    """Return `rms_norm`, compiled if this model's norms are fused."""
    return compiled_rms_norm if fusion.NORM in config.fused else _RMSNorm.apply


class RMSNorm(torch.nn.Module):
    """RMSNorm with support for zero-centred weights and sequence parallelism: `weight.sequence_parallel`
    makes Megatron sum its gradient over the TP ranks, of which each has seen its share of tokens or heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(config, hidden_size)
        self.normalize = norm_function(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.eps, self.zero_centered_gamma)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight: Any = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel
    return weight


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer, with `layer_norm_weight` and `weight` as in Transformer
    Engine's LayerNormLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.normalize = norm_function(config)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = self.normalize(
            input_,
            self.layer_norm_weight,
            self.config.layernorm_epsilon,
            self.config.layernorm_zero_centered_gamma,
        )
        return super().forward(normed, *args, **kwargs)


class _GroupedLinear(torch.nn.Module):
    """One linear layer per expert, `weight0`, … and, with biases, `bias0`, …, as in Transformer Engine's
    GroupedLinear. Rows of the input belong to the experts in order; the token dispatcher communicates.
    Expert-tensor parallelism does not divide layers with biases."""

    partition_dim: int
    """Dimension of a weight that expert-tensor parallelism divides."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ):
        super().__init__()
        assert not bias or get_pg_size(pg_collection.expt_tp) == 1, "biases are not divided"
        self.num_experts = num_experts
        self.use_bias, self.skip_bias_add = bias, skip_bias_add
        self.groups = pg_collection
        size = [output_size, input_size]
        size[self.partition_dim] = divide(size[self.partition_dim], get_pg_size(pg_collection.expt_tp))
        for expert in range(num_experts):
            weight = torch.nn.Parameter(torch.empty(*size, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            self.register_parameter(f"weight{expert}", weight)
            if bias:
                bias_parameter = torch.nn.Parameter(torch.empty(output_size, dtype=config.params_dtype))
                self.register_parameter(f"bias{expert}", bias_parameter)

    def forward(self, x_TI: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Return the output, and the biases of all experts if the caller must add them."""
        biases = [
            getattr(self, f"bias{expert}") for expert in range(self.num_experts if self.use_bias else 0)
        ]
        added = [] if self.skip_bias_add else biases
        parts = [
            F.linear(x, getattr(self, f"weight{expert}"), added[expert] if added else None)
            for expert, x in enumerate(x_TI.split(tokens_per_expert))
        ]
        return torch.cat(parts), biases if biases and self.skip_bias_add else None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the experts of all EP ranks as slices of one tensor each, as in Transformer Engine."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        first = get_pg_rank(self.groups.ep) * self.num_experts
        total = get_pg_size(self.groups.ep) * self.num_experts
        sharded: ShardedStateDict = {}
        kinds = ["weight", "bias"] if self.use_bias else ["weight"]
        for expert, kind in itertools.product(range(self.num_experts), kinds):
            entry = make_sharded_tensors_for_checkpoint(
                {f"{expert}.{kind}": getattr(self, f"{kind}{expert}")},
                "",
                {f"{expert}.weight": self.partition_dim},
                (*sharded_offsets, (len(sharded_offsets), first + expert, total)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(entry, f"{expert}.", prefix)
            shard = entry[f"{expert}.{kind}"]
            shard.replica_id = (*shard.replica_id[:2], get_pg_rank(self.groups.expt_dp))
            sharded[f"{prefix}{kind}{expert}"] = shard
        return sharded


class GroupedColumnLinear(_GroupedLinear):
    """The first layer of the experts: outputs are divided."""

    partition_dim = 0


class GroupedRowLinear(_GroupedLinear):
    """The second layer of the experts: inputs are divided."""

    partition_dim = 1


class NoCoreAttention(torch.nn.Module):
    """The place of core attention in Megatron's layer, since `PackedSelfAttention` computes that itself: it
    holds the sinks, a number per head of this rank, and the window."""

    def __init__(
        self, *, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, **_: Any
    ):
        super().__init__()
        self.tp_group = pg_collection.tp
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1  # Megatron leaves the token itself out
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = divide(config.num_attention_heads, get_pg_size(self.tp_group))
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks of all heads as one tensor, as in Transformer Engine."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class PackedSelfAttention(SelfAttention):
    """Causal self-attention over packed sequences, by torch's scaled_dot_product_attention over padded
    rectangles or, if fused, its flash attention. Projections, norms and parameters are Megatron's, whose own
    unfused forward passes loop over sequences."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *_: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert packed_seq_params is not None, "sequences must be packed"
        assert rotary_pos_emb is not None, "positions are rotary"
        projected = self.get_query_key_value_tensors(
            hidden_states, None, output_gate=self.config.attention_output_gate
        )
        query_NHD, key_NHD, value_NHD = (x.squeeze(1) for x in projected[:3])
        group, shared = self.pg_collection.cp, shared_prompts.continuations(packed_seq_params)
        positions_N = (
            packed.rank_positions(packed_seq_params.cu_seqlens_q, group.rank(), group.size())
            if shared is None
            else shared.positions_N
        )
        angles_ND = rotary_pos_emb[:, 0, 0].index_select(0, positions_N)
        grown = self._yarn_concentration_factor  # 1 except with YaRN
        cos, sin = grown * angles_ND.cos().unsqueeze(1), grown * angles_ND.sin().unsqueeze(1)
        turn = compiled_rotate if fusion.ROTARY in self.config.fused else rotate
        query_NHD, key_NHD = turn(query_NHD, cos, sin), turn(key_NHD, cos, sin)

        attend = self._attention(packed_seq_params, positions_N)
        if self.checkpoint_core_attention and self.training:
            output = checkpoint(attend, False, query_NHD, key_NHD, value_NHD)
        else:
            output = attend(query_NHD, key_NHD, value_NHD)
        output = output.flatten(1).unsqueeze(1)
        if self.config.attention_output_gate:
            gate = projected[3].reshape(output.shape)
            output = output * torch.sigmoid(wide(gate)).to(output.dtype)
        return self.linear_proj(output)

    def _attention(self, sequences: PackedSeqParams, positions_N: Tensor) -> Callable[..., Tensor]:
        """Return attention within these sequences, from this rank's queries, keys and values."""
        core, group = self.core_attention, self.pg_collection.cp
        cu_seqlens, shared = sequences.cu_seqlens_q, shared_prompts.continuations(sequences)
        of_layer = core.softmax_offset, core.window
        if shared is not None:
            return partial(packed_attention.attend_with_shared_prompts, shared, *of_layer)
        if group.size() > 1:
            return partial(packed_attention.attend_to_all_ranks, group, positions_N, cu_seqlens, *of_layer)
        if fusion.ATTENTION in self.config.fused and core.softmax_offset is None:
            return partial(fusion.attend, cu_seqlens, sequences.max_seqlen_q, core.window)
        return partial(packed_attention.attend_in_rectangles, cu_seqlens, *of_layer)


def rotate(x_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding to the first elements of each head (as many as `cos` has)."""
    turning, still = x_NHD.split([cos.shape[-1], x_NHD.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos.to(x_NHD.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x_NHD.dtype)
    return torch.cat((turned, still), dim=-1)


compiled_rotate = fusion.Compiled(fusion.ROTARY, rotate, rows=(0, 1, 2))
