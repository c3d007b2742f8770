"""Qwen3-Next's tensors: the delta net's input projection is stored by key heads."""

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
from megatron_ibpo.models.weight_map import ROWS, Entry, Piece

__all__ = ["layer_entries", "mtp_entries"]


def layer_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    mixer = attention(shape) if shape.full_attention[layer] else gated_delta_net(shape, _in_proj(shape))
    return [*mixer, *mlp(shape)]


def _in_proj(shape: DeltaNetShape) -> Entry:
    hidden, keys, values = shape.hidden_size, shape.gdn_keys, shape.gdn_values
    order = _ByKeyHeads(shape.gdn_key_dim, shape.gdn_value_dim, shape.gdn_value_heads // shape.gdn_key_heads)
    return Entry(
        IN_PROJ,
        (
            Piece("linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), ROWS),
            Piece("linear_attn.in_proj_ba.weight", (2 * shape.gdn_value_heads, hidden), ROWS),
        ),
        order.join,
        order.part,
        in_proj_cut(shape),
        IN_PROJ_SECTIONS,
    )


@dataclass(frozen=True)
class _ByKeyHeads:
    """The gated delta net's input projection. HF: for each key head [q | k | v | z] and [b | a] (v, z, b and
    a of its value heads). Megatron: [q | k | v | z | b | a], each for all heads."""

    key_dim: int
    value_dim: int
    values_per_key: int

    @property
    def _sizes(self) -> tuple[list[int], list[int]]:
        values = self.values_per_key * self.value_dim
        return [self.key_dim, self.key_dim, values, values], [self.values_per_key] * 2

    def join(self, cuts: list[Tensor]) -> Tensor:
        kinds = [
            kind.flatten(0, 1)
            for cut, sizes in zip(cuts, self._sizes, strict=True)
            for kind in cut.view(-1, sum(sizes), cut.shape[-1]).split(sizes, dim=1)
        ]
        return torch.cat(kinds)

    def part(self, shard: Tensor) -> list[Tensor]:
        qkvz, ba = self._sizes
        key_heads = len(shard) // (sum(qkvz) + sum(ba))
        kinds = [
            kind.unflatten(0, (key_heads, -1)) for kind in shard.split([key_heads * n for n in qkvz + ba])
        ]
        return [torch.cat(kinds[:4], dim=1).flatten(0, 1), torch.cat(kinds[4:], dim=1).flatten(0, 1)]
