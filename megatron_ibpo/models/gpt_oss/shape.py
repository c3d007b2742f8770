"""gpt-oss's dimensions."""

from megatron_ibpo.basics.text import shown
from megatron_ibpo.models.shape import MOST_REPEATED, Fields, ModelShape, common_fields

SIGMOID_GAIN = 1.702
"""Gain of the gate's activation; hard-coded in megatron-core (`quick_gelu`)."""
LIMIT = 7.0
"""Clamp: an upper bound of the gate, and a bound on both sides of the gated values; hard-coded in vLLM
0.32."""
KINDS = ("sliding_attention", "full_attention")
"""Kinds of layers, alternating; vLLM 0.32 supports no other order."""


def read(fields: Fields) -> ModelShape:
    common = common_fields(fields, head_dim=64, may_have_biases=True)
    layers = common["num_layers"]
    # megatron-core has one switch for the biases of attention, router and experts, and this family always has
    # them
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
        **{
            **common,
            "rms_norm_eps": fields.epsilon(1e-5),
            "max_position_embeddings": fields.count("max_position_embeddings", 131072),
        },
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
