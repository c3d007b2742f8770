"""The common parts of families that mix gated delta nets with attention: dimensions, the cost of a layer's
mixer, entries of the weight map, and the layers' classes.

A layer is attention or a gated delta net, and a dense MLP or experts:

| part                           | on GPUs                                     | local               |
|--------------------------------|---------------------------------------------|---------------------|
| gated delta net                | FlashGatedDeltaNet (flash-linear-attention) | PackedGatedDeltaNet |
| norm of the delta net's output | TEGatedNorm (Transformer Engine)            | GatedNorm           |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.cost import MixerCost, attention_cost
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import COLUMNS, ROWS, Cut, Entry, Piece

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DeltaNetShape(ModelShape):
    """The dimensions of a model with gated delta nets (gdn): heads, and elements per head."""

    gdn_key_heads: int
    gdn_value_heads: int
    """Number of value heads, a multiple of the key heads; each key head serves an equal number of them."""
    gdn_key_dim: int
    gdn_value_dim: int
    gdn_conv_kernel: int
    """Tokens that the short convolution sees, including the present one."""

    @property
    def gdn_keys(self) -> int:
        """Elements of all keys of a token."""
        return self.gdn_key_heads * self.gdn_key_dim

    @property
    def gdn_values(self) -> int:
        """Elements of all values of a token."""
        return self.gdn_value_heads * self.gdn_value_dim

    def divided_by_tp(self) -> dict[str, int]:
        return super().divided_by_tp() | {
            "the delta net's key heads": self.gdn_key_heads,
            "the delta net's value heads": self.gdn_value_heads,
        }


DEFAULTS = {
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
"""Defaults that the families' configuration classes in `transformers` share, and Qwen3.5's own."""
MOE_DEFAULTS = {
    **DEFAULTS, "hidden_size": 2048, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
"""The same with experts."""


def delta_net_fields(fields: Fields) -> dict[str, Any]:
    """Return all fields except those of the MLP or the experts. Raises ModelConfigError for a field that
    cannot be used."""
    common = common_fields(fields)
    value_heads, key_heads = fields.groups("linear_num_value_heads", "linear_num_key_heads")
    return common | {
        "full_attention": _full_attention(fields, common["num_layers"]),
        "attention_output_gate": True,
        "zero_centered_norms": True,
        "mtp_in_checkpoints": True,
        "gdn_key_heads": key_heads,
        "gdn_value_heads": value_heads,
        "gdn_key_dim": fields.count("linear_key_head_dim"),
        "gdn_value_dim": fields.count("linear_value_head_dim"),
        "gdn_conv_kernel": fields.count("linear_conv_kernel_dim"),
    }


def _full_attention(fields: Fields, layers: int) -> tuple[bool, ...]:
    types = fields.raw.get("layer_types")
    if types is None:
        interval = fields.count("full_attention_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    names = {"full_attention": True, "linear_attention": False}
    if not isinstance(types, list) or len(types) != layers or any(kind not in list(names) for kind in types):
        raise fields.error(f"layer_types must name {layers} layers, each one of {', '.join(names)}")
    return tuple(names[kind] for kind in types)


CHUNK = 64
"""Tokens between two states that flash-linear-attention stores for the backward pass."""


def mixer_cost(shape: DeltaNetShape, layer: int) -> MixerCost:
    return attention_cost(shape, layer) if shape.full_attention[layer] else delta_net_cost(shape)


def delta_net_cost(shape: DeltaNetShape) -> MixerCost:
    """Return the cost of a gated delta net. For every token the state is decayed and read for the old value,
    written, and read for the output."""
    key, value = shape.gdn_keys, shape.gdn_values
    state = value * shape.gdn_key_dim
    projected = 2 * key + 2 * value + 2 * shape.gdn_value_heads
    convolved = 2 * key + value
    repeated = 2 * shape.gdn_value_heads * shape.gdn_key_dim
    output = 3 * value
    return MixerCost(
        weights=shape.hidden_size * (projected + value),
        flops_per_token=6 * state,
        saved=projected + convolved + repeated + output + state // CHUNK,
        # additions of the state before a chunk: values and outputs as wide as keys, and their states
        saved_with_states=(2 + shape.gdn_key_dim // CHUNK) * shape.gdn_value_heads * shape.gdn_key_dim,
        exchanged=projected + value,
        recurrent_state=state,
        convolution_state=convolved * (shape.gdn_conv_kernel - 1),
    )


def mixed_entries(shape: DeltaNetShape, layer: int, in_proj: Entry) -> list[Entry]:
    """Return the entries of a layer: attention or a gated delta net, and a dense MLP or experts. `in_proj` is
    the delta net's `in_projection`."""
    full_attention = shape.full_attention[layer]
    mixer = shared_entries.attention(shape) if full_attention else _delta_net_entries(shape, in_proj)
    return [*mixer, *shared_entries.mlp(shape)]


def in_projection(
    shape: DeltaNetShape,
    pieces: tuple[Piece, ...],
    join: Callable[[list[Tensor]], Tensor],
    part: Callable[[Tensor], list[Tensor]],
) -> Entry:
    """Return the entry of the delta net's input projection, which the checkpoints of each family hold in
    different pieces. Megatron's has a section each of q, k, v, z, b and a, of all heads. Tensor-parallel
    ranks divide each section, and a Megatron checkpoint stores them apart."""
    keys, values, heads = shape.gdn_keys, shape.gdn_values, shape.gdn_value_heads
    return Entry(
        "self_attention.in_proj.weight",
        pieces,
        join,
        part,
        Cut(0, (keys, keys, values, values, heads, heads)),
        ("query", "key", "value", "z", "beta", "alpha"),
    )


def _delta_net_entries(shape: DeltaNetShape, in_proj: Entry) -> list[Entry]:
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
    inner = (*shared_entries.attention(shape), *shared_entries.mlp(shape))
    inside = [entry.within("transformer_layer.", prefix) for entry in inner]
    return [entry.within(prefix, "") for entry in (*around, *inside)]


def layer_spec(shape: DeltaNetShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    mixer = spec.attention(backend) if shape.full_attention[layer] else _delta_net_spec(backend)
    return spec.transformer_layer(mixer, spec.mlp(shape, backend))


def mtp_layer_spec(shape: DeltaNetShape, backend: spec.Backend) -> spec.LayerSpec:
    """Return the decoder layer inside the multi-token prediction layer: always attention."""
    return spec.transformer_layer(spec.attention(backend), spec.mlp(shape, backend))


def _delta_net_spec(backend: spec.Backend) -> spec.LayerSpec:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ibpo.models.delta_net import layer

    libraries = backend.libraries
    return ModuleSpec(
        module=layer.FlashGatedDeltaNet if libraries.flash_linear_attention else layer.PackedGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.norm_column_linear,
            out_norm=layer.TEGatedNorm if libraries.transformer_engine else layer.GatedNorm,
            out_proj=backend.row_linear,
        ),
    )


def megatron_fields(shape: DeltaNetShape) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [0 if full else 1 for full in shape.full_attention],
        "linear_conv_kernel_dim": shape.gdn_conv_kernel,
        "linear_key_head_dim": shape.gdn_key_dim,
        "linear_value_head_dim": shape.gdn_value_dim,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
    }
