"""Entries of the weight map that families with gated delta nets share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.shared_entries import attention, dense_mlp, moe
from megatron_ibpo.models.weight_map import COLUMNS, ROWS, Cut, Entry, Piece

if TYPE_CHECKING:
    from torch import Tensor


def mixed_entries(shape: DeltaNetShape, layer: int, in_proj: Entry) -> list[Entry]:
    """Return the entries of a layer: attention or a gated delta net, and a dense MLP or experts.

    Args:
        in_proj: the delta net's `in_projection`.
    """
    mixer = attention(shape) if shape.full_attention[layer] else _gated_delta_net(shape, in_proj)
    return [*mixer, *_mlp(shape)]


def in_projection(
    shape: DeltaNetShape,
    pieces: tuple[Piece, ...],
    join: Callable[[list[Tensor]], Tensor],
    part: Callable[[Tensor], list[Tensor]],
) -> Entry:
    """Return the entry of the delta net's input projection, which checkpoints of each family hold in other
    pieces. Megatron's has a section each of q, k, v, z, b and a, of all heads. Tensor-parallel ranks divide
    each section, and a Megatron checkpoint stores them apart."""
    keys, values, heads = shape.gdn_keys, shape.gdn_values, shape.gdn_value_heads
    return Entry(
        "self_attention.in_proj.weight",
        pieces,
        join,
        part,
        Cut(0, (keys, keys, values, values, heads, heads)),
        ("query", "key", "value", "z", "beta", "alpha"),
    )


def _gated_delta_net(shape: DeltaNetShape, in_proj: Entry) -> list[Entry]:
    hidden, keys, values = shape.hidden_size, shape.gdn_keys, shape.gdn_values
    return [
        Entry("self_attention.in_proj.layer_norm_weight", (Piece("input_layernorm.weight", (hidden,)),)),
        in_proj,
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


def _mlp(shape: DeltaNetShape) -> list[Entry]:
    return moe(shape) if shape.is_moe else dense_mlp(shape)


def mtp_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    """Return the entries of multi-token prediction: embedding and hidden state, each normed, are projected to
    one vector that goes through an attention layer. HF has the projection and norms once, for any number of
    layers."""
    hidden = shape.hidden_size
    prefix = f"mtp.layers.{layer}."
    around = [
        Entry("enorm.weight", (Piece("mtp.pre_fc_norm_embedding.weight", (hidden,)),)),
        Entry("hnorm.weight", (Piece("mtp.pre_fc_norm_hidden.weight", (hidden,)),)),
        Entry("eh_proj.weight", (Piece("mtp.fc.weight", (hidden, 2 * hidden), ROWS),)),
        Entry("final_layernorm.weight", (Piece("mtp.norm.weight", (hidden,)),)),
    ]
    inner = [entry.within("transformer_layer.", prefix) for entry in (*attention(shape), *_mlp(shape))]
    return [entry.within(prefix, "") for entry in (*around, *inner)]
