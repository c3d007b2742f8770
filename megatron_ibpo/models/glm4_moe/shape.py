"""GLM-4.5's dimensions."""

from dataclasses import dataclass

from megatron_ibpo.models.shape import MOST_REPEATED, Fields, ModelShape, common_fields


@dataclass(frozen=True, kw_only=True)
class Glm4MoeShape(ModelShape):
    routed_scaling_factor: float
    """Sum of the weights of a token's experts."""


def read(fields: Fields) -> Glm4MoeShape:
    common = common_fields(
        fields,
        head_dim=fields.count("hidden_size") // fields.count("num_attention_heads"),
        rotary_share=0.5,
        may_have_biases=True,
    )
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
        **{
            **common,
            "rms_norm_eps": fields.epsilon(1e-5),
            "max_position_embeddings": fields.count("max_position_embeddings", 131072),
        },
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
