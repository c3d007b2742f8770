"""Layers in plain torch, for machines without Transformer Engine. They take packed (thd) sequences, and
their parameters and checkpoint entries carry the names that Transformer Engine's layers give them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide, get_pg_rank, get_pg_size
from torch import Tensor

from megatron_ibpo.models import packed, zigzag


def wide(x: Tensor) -> Tensor:
    """In float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x_BH: Tensor, weight_H: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """RMSNorm with float32 statistics, in the order of operations that transformers uses."""
    normed = wide(x_BH)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normed * (1.0 + wide(weight_H))).to(x_BH.dtype)
    return weight_H * normed.to(x_BH.dtype)


class RMSNorm(torch.nn.Module):
    """RMSNorm that honours zero-centred weights and sequence parallelism.

    `weight.sequence_parallel` makes Megatron sum its gradient over the TP ranks, each of which has seen
    only its share of the tokens (or of the heads).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight: Any = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel
    return weight


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer: `layer_norm_weight` and `weight`, as in Transformer
    Engine's LayerNormLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = rms_norm(
            input_,
            self.layer_norm_weight,
            self.config.layernorm_epsilon,
            self.config.layernorm_zero_centered_gamma,
        )
        return super().forward(normed, *args, **kwargs)


class _GroupedLinear(torch.nn.Module):
    """One linear layer an expert, `weight0`, `weight1`, …, as in Transformer Engine's GroupedLinear.
    Rows of the input belong to the experts in order. Communication is the token dispatcher's."""

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
        **_: Any,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.groups = pg_collection
        size = [output_size, input_size]
        size[self.partition_dim] = divide(size[self.partition_dim], get_pg_size(pg_collection.expt_tp))
        for expert in range(num_experts):
            weight = torch.nn.Parameter(torch.empty(*size, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x_TI: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        parts = [
            F.linear(x, getattr(self, f"weight{expert}"))
            for expert, x in enumerate(x_TI.split(tokens_per_expert))
        ]
        return torch.cat(parts), None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Experts of all EP ranks as slices of one tensor `weight`, as Transformer Engine's are."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        first = get_pg_rank(self.groups.ep) * self.num_experts
        total = get_pg_size(self.groups.ep) * self.num_experts
        sharded: ShardedStateDict = {}
        for expert in range(self.num_experts):
            entry = make_sharded_tensors_for_checkpoint(
                {f"{expert}.weight": getattr(self, f"weight{expert}")},
                "",
                {f"{expert}.weight": self.partition_dim},
                (*sharded_offsets, (len(sharded_offsets), first + expert, total)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(entry, f"{expert}.", prefix)
            shard = entry[f"{expert}.weight"]
            shard.replica_id = (*shard.replica_id[:2], get_pg_rank(self.groups.expt_dp))
            sharded[f"{prefix}weight{expert}"] = shard
        return sharded


class GroupedColumnLinear(_GroupedLinear):
    """First layer of the experts: outputs are divided."""

    partition_dim = 0


class GroupedRowLinear(_GroupedLinear):
    """Second layer of the experts: inputs are divided."""

    partition_dim = 1


class NoCoreAttention(torch.nn.Module):
    """Holds core attention's place in Megatron's layer: `PackedSelfAttention` computes it itself."""

    def __init__(self, **_: Any):
        super().__init__()


class PackedSelfAttention(SelfAttention):
    """Causal self-attention over packed sequences by torch's scaled_dot_product_attention.

    Replaces Megatron's forward, whose unfused paths loop over sequences; projections, norms and
    parameters are inherited.
    """

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
        cu_seqlens = packed_seq_params.cu_seqlens_q
        group = self.pg_collection.cp
        positions_N = zigzag.positions(cu_seqlens, group.rank(), group.size())
        angles_ND = rotary_pos_emb[:, 0, 0].index_select(0, positions_N)
        grown = self._yarn_concentration_factor  # 1 but for YaRN
        cos, sin = grown * angles_ND.cos().unsqueeze(1), grown * angles_ND.sin().unsqueeze(1)
        query_NHD, key_NHD = _rotate(query_NHD, cos, sin), _rotate(key_NHD, cos, sin)

        attend: Callable[..., Tensor] = _attend
        if group.size() > 1:
            attend = partial(_attend_to_all_ranks, group, positions_N)
        if self.checkpoint_core_attention and self.training:
            output = checkpoint(attend, False, query_NHD, key_NHD, value_NHD, cu_seqlens)
        else:
            output = attend(query_NHD, key_NHD, value_NHD, cu_seqlens)
        output = output.flatten(1).unsqueeze(1)
        if self.config.attention_output_gate:
            gate = projected[3].reshape(output.shape)
            output = output * torch.sigmoid(wide(gate)).to(output.dtype)
        return self.linear_proj(output)


def _rotate(x_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on the first elements of each head (as many as `cos` has)."""
    turning, still = x_NHD.split([cos.shape[-1], x_NHD.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos.to(x_NHD.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x_NHD.dtype)
    return torch.cat((turned, still), dim=-1)


def _attend(query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Causal attention within each sequence; H query heads share G key/value heads. [N, H, D]."""
    rectangles = packed.by_length(cu_seqlens)
    heads = [query_NHD.shape[1], key_NGD.shape[1], value_NGD.shape[1]]
    together = packed.take(torch.cat((query_NHD, key_NGD, value_NGD), dim=1), rectangles)
    outputs = []
    for part_BLHD in rectangles.split(together):
        query, key, value = part_BLHD.transpose(1, 2).split(heads, dim=1)
        attended_BHLD = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        outputs.append(attended_BHLD.transpose(1, 2).flatten(0, 1))
    return packed.drop(torch.cat(outputs), rectangles)


def _attend_to_all_ranks(
    group: Any, positions_N: Tensor, query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The same under context parallelism: of the queries that this rank holds, to keys and values that are
    gathered from all ranks. [N, H, D].

    Args:
        positions_N: of the queries in their sequences.
        cu_seqlens: of whole sequences.
    """
    ranks = group.size()
    together = torch.cat((key_NGD, value_NGD), dim=1)
    by_rank = gather_from_sequence_parallel_region(together, tensor_parallel_output_grad=True, group=group)
    whole = by_rank.index_select(0, zigzag.places(cu_seqlens, ranks))
    wanting, wanted = packed.by_length(cu_seqlens, ranks), packed.by_length(cu_seqlens)
    queries = wanting.split(packed.take(query_NHD, wanting))
    positions = wanting.split(packed.take(positions_N, wanting))
    outputs = []
    for query_BLHD, position_BL, part_BKGD in zip(
        queries, positions, wanted.split(packed.take(whole, wanted)), strict=True
    ):
        key, value = part_BKGD.transpose(1, 2).chunk(2, dim=1)
        # what pads a sequence comes after all positions
        seen = torch.arange(key.shape[2], device=key.device) <= position_BL[:, None, :, None]
        query = query_BLHD.transpose(1, 2)
        attended_BHLD = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        outputs.append(attended_BHLD.transpose(1, 2).flatten(0, 1))
    return packed.drop(torch.cat(outputs), wanting)
