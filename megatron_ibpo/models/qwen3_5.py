"""Qwen3.5 and its successors under the same names: https://huggingface.co/Qwen/Qwen3.5-27B (dense) and
https://huggingface.co/Qwen/Qwen3.5-35B-A3B (a mixture of experts with a shared one).

Layers are Qwen3-Next's, with a dense MLP where there are no experts, and the delta net's input projection
is stored in four tensors. Checkpoints wrap the text model in one that also sees (`text_config`, names under
`model.language_model.`): the text model is trained, and the vision tower is carried along as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.models.delta_net import shape as delta_net
from megatron_ibpo.models.delta_net.shape import DeltaNetShape
from megatron_ibpo.models.shape import Fields, expert_fields
from megatron_ibpo.models.weight_map import ROWS, Cut, Entry, Piece, concatenate

if TYPE_CHECKING:
    from torch import Tensor

# the same in all families with delta nets
mixer_cost, mtp_entries = delta_net.mixer_cost, delta_net.mtp_entries
layer_spec, mtp_layer_spec = delta_net.layer_spec, delta_net.mtp_layer_spec
megatron_fields = delta_net.megatron_fields

TEXT = "_text"
"""Suffix of `model_type` for a text model that is not wrapped."""


DENSE = {**delta_net.DEFAULTS, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288}
MOE = {
    **delta_net.MOE_DEFAULTS, "vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8,
    "num_experts": 256,
}  # fmt: skip
"""Defaults of `transformers`' Qwen3_5TextConfig and Qwen3_5MoeTextConfig."""


def read(fields: Fields) -> DeltaNetShape:
    """Read the shape. `rope_parameters` may divide the rotation among time, height and width (mrope); a text
    has the same positions in all three, so its rotation is the plain one."""
    family = fields.raw["model_type"]
    if family.endswith(TEXT):
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
    fields.refuse("attn_output_gate", True)
    fields.refuse("output_gate_type", "swish", "silu")  # of the delta net
    is_moe = family.removesuffix(TEXT).endswith("_moe")
    fields = fields.or_default(MOE if is_moe else DENSE)
    if is_moe:
        shared = fields.count("shared_expert_intermediate_size")
        mlp = {**expert_fields(fields), "shared_expert_hidden_size": shared}
    else:
        mlp = {"ffn_hidden_size": fields.count("intermediate_size")}
    return DeltaNetShape(**delta_net.delta_net_fields(fields), **mlp)


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


def layer_entries(shape: DeltaNetShape, layer: int) -> list[Entry]:
    return delta_net.mixed_entries(shape, layer, _in_proj(shape))


def _in_proj(shape: DeltaNetShape) -> Entry:
    hidden, keys, values, heads = shape.hidden_size, shape.gdn_keys, shape.gdn_values, shape.gdn_value_heads
    rows = 2 * keys + values, values, heads, heads
    return delta_net.in_projection(
        shape,
        (
            Piece("linear_attn.in_proj_qkv.weight", (rows[0], hidden), Cut(0, (keys, keys, values))),
            Piece("linear_attn.in_proj_z.weight", (values, hidden), ROWS),
            Piece("linear_attn.in_proj_b.weight", (heads, hidden), ROWS),
            Piece("linear_attn.in_proj_a.weight", (heads, hidden), ROWS),
        ),
        concatenate,
        partial(_split, rows),
    )


def _split(rows: tuple[int, ...], shard: Tensor) -> list[Tensor]:
    """Return a rank's parts of HF's [q | k | v], [z], [b] and [a], each for all heads and of so many `rows`,
    from its shard of Megatron's tensor of the same rows."""
    ranks = sum(rows) // len(shard)
    return list(shard.split([n // ranks for n in rows]))
