"""Qwen3.5's tensors: the delta net's input projections are stored separately."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.delta_net.weight_map import (
    IN_PROJ,
    IN_PROJ_SECTIONS,
    gated_delta_net,
    in_proj_cut,
    mlp,
    mtp_entries,
)
from megatron_ibpo.models.shared_entries import attention
from megatron_ibpo.models.weight_map import ROWS, Cut, Entry, Piece

__all__ = ["layer_entries", "mtp_entries"]


def layer_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    mixer = attention(shape) if shape.full_attention[layer] else gated_delta_net(shape, _in_proj(shape))
    return [*mixer, *mlp(shape)]


def _in_proj(shape: DeltaNetShape) -> Entry:
    hidden, keys, values, heads = shape.hidden_size, shape.gdn_keys, shape.gdn_values, shape.gdn_value_heads
    qkv = 2 * keys + values
    return Entry(
        IN_PROJ,
        (
            Piece("linear_attn.in_proj_qkv.weight", (qkv, hidden), Cut(0, (keys, keys, values))),
            Piece("linear_attn.in_proj_z.weight", (values, hidden), ROWS),
            Piece("linear_attn.in_proj_b.weight", (heads, hidden), ROWS),
            Piece("linear_attn.in_proj_a.weight", (heads, hidden), ROWS),
        ),
        torch.cat,
        _Apart((qkv, values, heads, heads)).part,
        in_proj_cut(shape),
        IN_PROJ_SECTIONS,
    )


@dataclass(frozen=True)
class _Apart:
    """A join of HF's [q | k | v], [z], [b] and [a], each for all heads, into Megatron's tensor of the same
    rows."""

    rows: tuple[int, ...]
    """Rows of the HF tensors."""

    def part(self, shard: Tensor) -> list[Tensor]:
        ranks = sum(self.rows) // len(shard)
        return list(shard.split([rows // ranks for rows in self.rows]))
