"""Qwen3-Next's tensors: gated delta nets, and the multi-token prediction layer of its checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ibpo.models.qwen3_next.shape import Qwen3NextShape
from megatron_ibpo.models.shared_entries import attention, moe
from megatron_ibpo.models.weight_map import COLUMNS, ROWS, Cut, Entry, Piece


def layer_entries(shape: Qwen3NextShape, layer: int) -> list[Entry]:
    mixer = attention(shape) if shape.full_attention[layer] else _gated_delta_net(shape)
    return [*mixer, *moe(shape)]


def mtp_entries(shape: Qwen3NextShape, layer: int) -> list[Entry]:
    """Multi-token prediction: embedding and hidden state, each normed, are projected to one vector that
    goes through an attention layer. HF has the projection and norms once, whatever the layers."""
    hidden = shape.hidden_size
    prefix = f"mtp.layers.{layer}."
    around = [
        Entry("enorm.weight", (Piece("mtp.pre_fc_norm_embedding.weight", (hidden,)),)),
        Entry("hnorm.weight", (Piece("mtp.pre_fc_norm_hidden.weight", (hidden,)),)),
        Entry("eh_proj.weight", (Piece("mtp.fc.weight", (hidden, 2 * hidden), ROWS),)),
        Entry("final_layernorm.weight", (Piece("mtp.norm.weight", (hidden,)),)),
    ]
    inner = [entry.within("transformer_layer.", prefix) for entry in (*attention(shape), *moe(shape))]
    return [entry.within(prefix, "") for entry in (*around, *inner)]


def _gated_delta_net(shape: Qwen3NextShape) -> list[Entry]:
    hidden = shape.hidden_size
    keys = shape.gdn_key_heads * shape.gdn_key_dim
    values = shape.gdn_value_heads * shape.gdn_value_dim
    in_proj = _DeltaNetInput(
        shape.gdn_key_dim, shape.gdn_value_dim, shape.gdn_value_heads // shape.gdn_key_heads
    )
    return [
        Entry("self_attention.in_proj.layer_norm_weight", (Piece("input_layernorm.weight", (hidden,)),)),
        Entry(
            "self_attention.in_proj.weight",
            (
                Piece("linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), ROWS),
                Piece("linear_attn.in_proj_ba.weight", (2 * shape.gdn_value_heads, hidden), ROWS),
            ),
            in_proj.join,
            in_proj.part,
            Cut(0, (keys, keys, values, values, shape.gdn_value_heads, shape.gdn_value_heads)),
            ("query", "key", "value", "z", "beta", "alpha"),
        ),
        Entry(
            "self_attention.conv1d.weight",
            (
                Piece(
                    "linear_attn.conv1d.weight",
                    (2 * keys + values, 1, shape.gdn_conv_kernel),
                    Cut(0, (keys, keys, values)),
                ),
            ),
            stored_apart=("query", "key", "value"),
        ),
        Entry("self_attention.dt_bias", (Piece("linear_attn.dt_bias", (shape.gdn_value_heads,), ROWS),)),
        Entry("self_attention.A_log", (Piece("linear_attn.A_log", (shape.gdn_value_heads,), ROWS),)),
        Entry("self_attention.out_norm.weight", (Piece("linear_attn.norm.weight", (shape.gdn_value_dim,)),)),
        Entry(
            "self_attention.out_proj.weight",
            (Piece("linear_attn.out_proj.weight", (hidden, values), COLUMNS),),
        ),
    ]


@dataclass(frozen=True)
class _DeltaNetInput:
    """The gated delta net's input projection. HF: for each key head [q | k | v | z] and [b | a] (v, z, b
    and a of its value heads). Megatron: [q | k | v | z | b | a], each of all heads."""

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
