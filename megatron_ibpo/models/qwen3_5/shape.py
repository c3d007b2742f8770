"""Dimensions of Qwen3.5's text model."""

from dataclasses import replace
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.models.delta_net.shape import DeltaNetShape, delta_net_fields
from megatron_ibpo.models.shape import Fields, expert_fields

TEXT = "_text"
"""Suffix of `model_type` for a text model that is not wrapped."""


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
    return DeltaNetShape(**delta_net_fields(fields), **(_experts(fields) if is_moe else _dense(fields)))


def _dense(fields: Fields) -> dict[str, Any]:
    return {"ffn_hidden_size": fields.count("intermediate_size")}


def _experts(fields: Fields) -> dict[str, Any]:
    shared = fields.count("shared_expert_intermediate_size")
    return {**expert_fields(fields, normalized=True), "shared_expert_hidden_size": shared}


def _tied(fields: Fields, inner: dict[str, Any]) -> bool:
    """Return whether the head is the embedding. transformers asks the wrapping model, vLLM the text model."""
    key = "tie_word_embeddings"
    outer, text = fields.flag(key, inner.get(key, False)), inner.get(key, fields.raw.get(key, False))
    if outer != text:
        raise fields.error(f"{key} is {outer}, and {text} in text_config: which of the two?")
    return outer
