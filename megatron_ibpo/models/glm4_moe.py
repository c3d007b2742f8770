"""GLM-4.5, GLM-4.5-Air (https://huggingface.co/zai-org/GLM-4.5-Air) and GLM-4.6. GLM Team, "GLM-4.5", 2025.

A router scores experts by sigmoids and chooses by scores plus a correction, which is no parameter and does
not change. Checkpoints hold their multi-token prediction layer as one more layer, which is carried along.
"""

from dataclasses import dataclass
from typing import Any

from megatron_ibpo.models import shared_entries, spec
from megatron_ibpo.models.shape import MOST_REPEATED, Fields, ModelShape, common_fields
from megatron_ibpo.models.weight_map import EXPERT_BIAS, Entry, Piece


@dataclass(frozen=True, kw_only=True)
class Glm4MoeShape(ModelShape):
    routed_scaling_factor: float
    """Sum of the weights of a token's experts."""


DEFAULTS = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
"""Defaults of `transformers`\' Glm4MoeConfig; a head has hidden_size / num_attention_heads elements."""
ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
"""Names of `transformers` for fields of published files."""


def read(fields: Fields) -> Glm4MoeShape:
    renamed = {canonical: fields.raw[name] for name, canonical in ALIASES.items() if name in fields.raw}
    fields = fields.or_default({**DEFAULTS, **renamed})
    common = common_fields(fields, may_have_biases=True)
    layers = common["num_layers"]
    dense = fields.count("first_k_dense_replace", 1, least=0)
    if dense >= layers:
        raise fields.error(f"first_k_dense_replace={dense} leaves no layer of {layers} with experts")
    # experts in groups; a token goes to only a few groups
    fields.refuse("n_group", 1)
    fields.refuse("topk_group", 1)
    # megatron-core always normalises sigmoids, except for a single expert, where it never does
    fields.refuse("norm_topk_prob", True)
    chosen = fields.count("num_experts_per_tok")
    if chosen == 1:
        raise fields.error("num_experts_per_tok=1 is not supported")
    fields.refuse("tie_word_embeddings", False)  # vLLM 0.32 would not tie them
    factor = fields.number("routed_scaling_factor", 1.0)
    if factor <= 0:
        raise fields.error(f"routed_scaling_factor must be positive, is {factor:g}")
    size = fields.count("moe_intermediate_size")
    predicting = fields.count("num_nextn_predict_layers", 1, least=0, most=MOST_REPEATED)
    return Glm4MoeShape(
        **common,
        ffn_hidden_size=fields.count("intermediate_size"),
        dense_layers=dense,
        query_key_norms=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        num_experts=fields.count("n_routed_experts", most=MOST_REPEATED),
        experts_per_token=chosen,
        expert_hidden_size=size,
        shared_expert_hidden_size=size * fields.count("n_shared_experts", 1),
        shared_expert_gate=False,
        routed_scaling_factor=factor,
        carried=tuple(f"model.layers.{layers + layer}." for layer in range(predicting)),
    )


def layer_entries(shape: ModelShape, layer: int) -> list[Entry]:
    import torch

    if not shape.has_experts(layer):
        return [*shared_entries.attention(shape), *shared_entries.dense_mlp(shape)]
    bias = Piece("mlp.gate.e_score_correction_bias", (shape.num_experts,))
    return [
        *shared_entries.attention(shape),
        *shared_entries.moe(shape, shared="mlp.shared_experts"),
        Entry(EXPERT_BIAS, (bias,), dtype=torch.float32),
    ]


def layer_spec(shape: Glm4MoeShape, layer: int, backend: spec.Backend) -> spec.LayerSpec:
    has_experts = shape.has_experts(layer)
    mlp = spec.moe(shape, backend, _frozen_bias_router) if has_experts else spec.dense_mlp(backend)
    return spec.transformer_layer(spec.attention(backend, norms=shape.query_key_norms), mlp)


def _frozen_bias_router(*args: Any, **kwargs: Any) -> Any:
    """Make a router whose correction stays as it is. (An update rate of 0 would turn -0.0 into 0.0.)"""
    from megatron.core.transformer.moe.router import TopKRouter

    router = TopKRouter(*args, **kwargs)
    router.frozen_expert_bias = True
    return router


def megatron_fields(shape: Glm4MoeShape) -> dict[str, Any]:
    return {
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": shape.routed_scaling_factor,
    }
