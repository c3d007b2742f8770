"""Qwen3-Next: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct.

Three layers of four are gated delta nets, the fourth is attention with an output gate; every layer has a
mixture of experts with a shared one. Norms are zero-centred, except that of the delta net's output.
Checkpoints hold the delta net's input projection by key heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ibpo.models.delta_net import shape as delta_net
from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.shape import Fields, expert_fields
from megatron_ibpo.models.weight_map import ROWS, Entry, Piece, concatenate

if TYPE_CHECKING:
    from torch import Tensor

# the same in all families with delta nets
mixer_cost, mtp_entries = delta_net.mixer_cost, delta_net.mtp_entries
layer_spec, mtp_layer_spec = delta_net.layer_spec, delta_net.mtp_layer_spec
megatron_fields = delta_net.megatron_fields


DEFAULTS = {
    **delta_net.MOE_DEFAULTS, "vocab_size": 151936, "num_hidden_layers": 48, "num_experts_per_tok": 10,
    "num_experts": 512,
}  # fmt: skip
"""Defaults of `transformers`\' Qwen3NextConfig."""


def read(fields: Fields) -> DeltaNetShape:
    fields = fields.or_default(DEFAULTS)
    return DeltaNetShape(
        **delta_net.delta_net_fields(fields),
        **expert_fields(fields),
        shared_expert_hidden_size=fields.count("shared_expert_intermediate_size"),
    )


def layer_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    return delta_net.mixed_entries(shape, layer, _in_proj(shape))


def _in_proj(shape: DeltaNetShape) -> Entry:
    hidden, keys, values = shape.hidden_size, shape.gdn_keys, shape.gdn_values
    order = _ByKeyHeads(shape.gdn_key_dim, shape.gdn_value_dim, shape.gdn_value_heads // shape.gdn_key_heads)
    return delta_net.in_projection(
        shape,
        (
            Piece("linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), ROWS),
            Piece("linear_attn.in_proj_ba.weight", (2 * shape.gdn_value_heads, hidden), ROWS),
        ),
        order.join,
        order.part,
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
        return concatenate(kinds)

    def part(self, shard: Tensor) -> list[Tensor]:
        qkvz, ba = self._sizes
        key_heads = len(shard) // (sum(qkvz) + sum(ba))
        kinds = [
            kind.unflatten(0, (key_heads, -1)) for kind in shard.split([key_heads * n for n in qkvz + ba])
        ]
        return [concatenate(kinds[:4], dim=1).flatten(0, 1), concatenate(kinds[4:], dim=1).flatten(0, 1)]
