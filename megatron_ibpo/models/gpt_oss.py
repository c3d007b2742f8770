"""gpt-oss-20b and gpt-oss-120b (https://huggingface.co/openai/gpt-oss-20b). OpenAI, "gpt-oss Model Card",
2025.

Attention with sinks and, in every other layer, a window; biases in experts and router too. Checkpoints hold
all experts of a layer in one tensor: transposed, and with the outputs of gate and up in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import MOST_REPEATED, Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import Entry, Fused, Piece

if TYPE_CHECKING:
    from torch import Tensor

    Change = Callable[[Tensor], Tensor]

SIGMOID_GAIN = 1.702
"""Gain of the gate's activation; hard-coded in megatron-core (`quick_gelu`)."""
LIMIT = 7.0
"""Clamp: an upper bound of the gate, and a bound on both sides of the gated values; hard-coded in vLLM
0.32."""
KINDS = ("sliding_attention", "full_attention")
"""Kinds of layers, alternating; vLLM 0.32 supports no other order."""


DEFAULTS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4,
    "sliding_window": 128,
}  # fmt: skip
"""Defaults of `transformers`' GptOssConfig."""
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
"""Its rope_parameters where config.json has neither these nor rope_scaling."""


def read(fields: Fields) -> ModelShape:
    fields = fields.or_default(DEFAULTS)
    if fields.raw.get("rope_parameters") is None and not fields.raw.get("rope_scaling"):
        fields = replace(fields, raw={**fields.raw, "rope_parameters": ROPE})
    common = common_fields(fields, may_have_biases=True)
    layers = common["num_layers"]
    # megatron-core has one switch for the biases of attention, router and experts
    fields.refuse("attention_bias", True)
    fields.refuse("attention_dropout", 0)
    fields.refuse("tie_word_embeddings", False)  # vLLM 0.32 would not tie them
    fields.refuse("swiglu_alpha", SIGMOID_GAIN)
    fields.refuse("swiglu_limit", LIMIT)
    kinds = [KINDS[layer % 2] for layer in range(layers)]
    if fields.raw.get("layer_types") not in (None, kinds):
        raise fields.error(
            f"layer_types must be {KINDS[0]} and {KINDS[1]} in turn for {layers} layers, is "
            f"{shown(fields.raw['layer_types'])}"
        )
    window = fields.count("sliding_window", 128)
    return ModelShape(
        **common,
        windows=tuple(window if kind == KINDS[0] else None for kind in kinds),
        attention_sinks=True,
        query_key_norms=False,
        qkv_bias=True,
        attention_output_bias=True,
        num_experts=fields.count("num_local_experts", most=MOST_REPEATED),
        experts_per_token=fields.count("num_experts_per_tok"),
        expert_hidden_size=fields.count("intermediate_size"),
        expert_bias=True,
    )


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    hidden = shape.hidden_size
    return [
        *shared_entries.attention(shape),
        Entry("pre_mlp_layernorm.weight", (Piece("post_attention_layernorm.weight", (hidden,)),)),
        Entry("mlp.router.weight", (Piece("mlp.router.weight", (shape.num_experts, hidden)),)),
        Entry("mlp.router.bias", (Piece("mlp.router.bias", (shape.num_experts,)),)),
        *_experts(shape),
    ]


@lru_cache(maxsize=2)  # the same in every layer
def _experts(shape: ModelShape) -> tuple[Entry, ...]:
    hidden, size = shape.hidden_size, shape.expert_hidden_size
    double = 2 * size
    parameters: tuple[tuple[str, str, tuple[int, ...], Change, Change], ...] = (
        (
            "linear_fc1.weight", "gate_up_proj", (hidden, double),
            lambda x: _deinterleave(x.t()), lambda x: _interleave(x).t(),
        ),
        ("linear_fc1.bias", "gate_up_proj_bias", (double,), _deinterleave, _interleave),
        ("linear_fc2.weight", "down_proj", (size, hidden), lambda x: x.t(), lambda x: x.t()),
        ("linear_fc2.bias", "down_proj_bias", (hidden,), lambda x: x, lambda x: x),
    )  # fmt: skip
    experts = range(shape.num_experts)
    return tuple(_entry(shape, expert, *parameter) for parameter in parameters for expert in experts)


def _entry(
    shape: ModelShape, expert: int, megatron: str, hf: str, piece: tuple[int, ...], join: Change, part: Change
) -> Entry:
    """Return the entry of one parameter of an expert, a `piece` of the layer's tensor in a checkpoint."""
    fused = Fused(f"mlp.experts.{hf}", (shape.num_experts, *piece), expert, 0, always=True)
    return Entry(
        f"mlp.experts.{megatron}{expert}",
        (Piece(f"mlp.experts.{expert}.{hf}", piece, fused=fused),),
        lambda cuts: join(cuts[0]),
        lambda shard: [part(shard)],
        by_rows=False,
        joined_shape=piece[::-1],
        expert=expert,
        num_experts=shape.num_experts,
    )


def _deinterleave(x: Tensor) -> Tensor:
    """Return all rows of gate, then all rows of up, from alternating rows."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def _interleave(x: Tensor) -> Tensor:
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def layer_spec(shape: ModelShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    return spec.transformer_layer(spec.attention(backend, norms=False), spec.moe(shape, backend))


def megatron_fields(shape: ModelShape) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": LIMIT,
    }
