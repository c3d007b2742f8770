"""Entries of the weight map that families with gated delta nets share."""

from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.shared_entries import attention, dense_mlp, moe
from megatron_ibpo.models.weight_map import COLUMNS, ROWS, Cut, Entry, Piece

IN_PROJ = "self_attention.in_proj.weight"
IN_PROJ_SECTIONS = "query", "key", "value", "z", "beta", "alpha"
"""Sections of Megatron's input projection, each for all heads; a Megatron checkpoint stores them
separately."""


def in_proj_cut(shape: DeltaNetShape) -> Cut:
    """Return how tensor-parallel ranks divide the sections of the input projection."""
    keys, values, heads = shape.gdn_keys, shape.gdn_values, shape.gdn_value_heads
    return Cut(0, (keys, keys, values, values, heads, heads))


def gated_delta_net(shape: DeltaNetShape, in_proj: Entry) -> list[Entry]:
    """
    Args:
        in_proj: the input projection, which differs between the checkpoints of families.
    """
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


def mlp(shape: DeltaNetShape) -> list[Entry]:
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
    inner = [entry.within("transformer_layer.", prefix) for entry in (*attention(shape), *mlp(shape))]
    return [entry.within(prefix, "") for entry in (*around, *inner)]
