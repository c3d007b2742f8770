"""Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct) and Qwen3.5 with its successors under
the same names (https://huggingface.co/Qwen/Qwen3.5-27B): gated delta nets (`delta_net`), and attention with
an output gate.

Norms are zero-centred, except that of the delta net's output. Qwen3.5 may be dense, and its checkpoints wrap
the text model in one that also sees (`text_config`): the text model is trained, and the vision tower carried
along as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.cost import MixerCost, attention_cost
from megatron_ibpo.models.shape import Fields, ModelShape, common_fields, expert_fields
from megatron_ibpo.models.weight_map import COLUMNS, ROWS, Cut, Entry, Piece, concatenate

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


COMMON = {
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
COMMON_OF_MOE = {
    **COMMON, "hidden_size": 2048, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
NEXT = {
    **COMMON_OF_MOE, "vocab_size": 151936, "num_hidden_layers": 48, "num_experts_per_tok": 10,
    "num_experts": 512,
}  # fmt: skip
DENSE = {**COMMON, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
MOE = {
    **COMMON_OF_MOE, "vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8,
    "num_experts": 256,
}  # fmt: skip
"""Defaults of `transformers`' Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig."""
NEXT_FAMILY = "qwen3_next"
TEXT = "_text"
"""Suffix of Qwen3.5's `model_type` for a text model that is not wrapped."""


def read(fields: Fields) -> DeltaNetShape:
    """Read the shape. `rope_parameters` may divide the rotation among time, height and width (mrope); a text
    has the same positions in all three, so its rotation is the plain one."""
    family = fields.raw["model_type"]
    if family == NEXT_FAMILY or family.endswith(TEXT):
        return _text_model(fields, family)
    inner = fields.raw.get("text_config")
    if not isinstance(inner, dict):
        raise fields.error(
            f"text_config must hold the text model's fields, is {shown(inner)}; a text model that is not "
            f"wrapped has model_type {family}{TEXT}"
        )
    text = _text_model(replace(fields, raw={**inner, "model_type": family}), family)
    return replace(
        text,
        tie_word_embeddings=_tied(fields, inner),
        hf_prefix="model.language_model.",
        carried=("model.visual.",),
    )


def _text_model(fields: Fields, family: str) -> DeltaNetShape:
    if family != NEXT_FAMILY:
        fields.refuse("attn_output_gate", True)
        fields.refuse("output_gate_type", "swish", "silu")  # of the delta net
    has_experts = family == NEXT_FAMILY or family.removesuffix(TEXT).endswith("_moe")
    fields = fields.or_default(NEXT if family == NEXT_FAMILY else MOE if has_experts else DENSE)
    if has_experts:
        shared = fields.count("shared_expert_intermediate_size")
        mlp = {**expert_fields(fields), "shared_expert_hidden_size": shared}
    else:
        mlp = {"ffn_hidden_size": fields.count("intermediate_size")}
    return DeltaNetShape(**_delta_net_fields(fields), **mlp)


def _tied(fields: Fields, inner: dict[str, Any]) -> bool:
    """Return whether the head is the embedding. transformers asks the wrapping model, vLLM the text model;
    where the field is missing, the answer of both is no."""
    key = "tie_word_embeddings"
    outer, text = fields.flag(key, False), inner.get(key, False)
    if outer != text:
        spelled = [raw.get(key, "missing") for raw in (fields.raw, inner)]
        raise fields.error(
            f"{key} is {spelled[0]}, and {spelled[1]} in text_config: which of the two? (missing is False)"
        )
    return outer


def _delta_net_fields(fields: Fields) -> dict[str, Any]:
    """Return all fields except those of the MLP or the experts."""
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
    """Return the cost of attention or of a gated delta net, where for every token the state is decayed and
    read for the old value, written, and read for the output."""
    if shape.full_attention[layer]:
        return attention_cost(shape, layer)
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


def layer_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    mixer = shared_entries.attention(shape) if shape.full_attention[layer] else _delta_net_entries(shape)
    return [*mixer, *shared_entries.mlp(shape)]


def _delta_net_entries(shape: DeltaNetShape) -> list[Entry]:
    hidden, keys, values = shape.hidden_size, shape.gdn_keys, shape.gdn_values
    rows = 2 * keys + values, 1, shape.gdn_conv_kernel
    conv = Piece("linear_attn.conv1d.weight", rows, Cut(0, (keys, keys, values)))
    return [
        Entry("self_attention.in_proj.layer_norm_weight", (Piece("input_layernorm.weight", (hidden,)),)),
        _in_projection(shape),
        Entry("self_attention.conv1d.weight", (conv,), stored_apart=("query", "key", "value")),
        Entry("self_attention.dt_bias", (Piece("linear_attn.dt_bias", (shape.gdn_value_heads,), ROWS),)),
        Entry("self_attention.A_log", (Piece("linear_attn.A_log", (shape.gdn_value_heads,), ROWS),)),
        Entry("self_attention.out_norm.weight", (Piece("linear_attn.norm.weight", (shape.gdn_value_dim,)),)),
        Entry(
            "self_attention.out_proj.weight",
            (Piece("linear_attn.out_proj.weight", (hidden, values), COLUMNS),),
        ),
    ]


def _in_projection(shape: DeltaNetShape) -> Entry:
    """Return the entry of the delta net's input projection. Megatron's has a section each of q, k, v, z, b
    and a, of all heads: tensor-parallel ranks divide each section, and a Megatron checkpoint stores them
    apart. HF's is in two tensors by key heads in Qwen3-Next, otherwise in four."""
    hidden, keys, values, heads = shape.hidden_size, shape.gdn_keys, shape.gdn_values, shape.gdn_value_heads
    join: Callable[[list[Tensor]], Tensor] = concatenate
    part: Callable[[Tensor], list[Tensor]]
    if shape.family == NEXT_FAMILY:
        order = _ByKeyHeads(shape.gdn_key_dim, shape.gdn_value_dim, heads // shape.gdn_key_heads)
        join, part = order.join, order.part
        pieces: tuple[Piece, ...] = (
            Piece("linear_attn.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden), ROWS),
            Piece("linear_attn.in_proj_ba.weight", (2 * heads, hidden), ROWS),
        )
    else:
        rows = 2 * keys + values, values, heads, heads
        part = partial(_split, rows)
        pieces = (
            Piece("linear_attn.in_proj_qkv.weight", (rows[0], hidden), Cut(0, (keys, keys, values))),
            Piece("linear_attn.in_proj_z.weight", (values, hidden), ROWS),
            Piece("linear_attn.in_proj_b.weight", (heads, hidden), ROWS),
            Piece("linear_attn.in_proj_a.weight", (heads, hidden), ROWS),
        )
    cut = Cut(0, (keys, keys, values, values, heads, heads))
    names = ("query", "key", "value", "z", "beta", "alpha")
    return Entry("self_attention.in_proj.weight", pieces, join, part, cut, names)


def _split(rows: tuple[int, ...], shard: Tensor) -> list[Tensor]:
    """Return a rank's parts of HF's [q | k | v], [z], [b] and [a], each for all heads and of so many `rows`,
    from its shard of Megatron's tensor of the same rows."""
    ranks = sum(rows) // len(shard)
    return list(shard.split([n // ranks for n in rows]))


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


def mtp_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    """Return the entries of multi-token prediction: embedding and hidden state, each normed, are projected to
    one vector for an attention layer. HF has the projection and norms once for all layers."""
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
