"""A field that config.json lacks has the value of the family's configuration class in transformers, by which
engines read the file."""

import json

import pytest

from megatron_ibpo.models import ModelConfigError, read_hf_config
from megatron_ibpo.models.families import FAMILIES
from megatron_ibpo.models.shape import RopeScaling

OTHERS = {
    "vocab_size": 320, "hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 32, "head_dim": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-4, "rope_theta": 5e5,
    "initializer_range": 0.1, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    "intermediate_size": 192, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "partial_rotary_factor": 1.0, "full_attention_interval": 2,
    "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "shared_expert_intermediate_size": 48,
    "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5,
    "use_qk_norm": True, "num_nextn_predict_layers": 2, "num_local_experts": 6, "sliding_window": 64,
}  # fmt: skip
"""Values that no class has by default."""
OF_MOE = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
OF_DELTA_NET = {name for name in OTHERS if name.startswith("linear_")} | {"full_attention_interval"}
OF_DENSE = {"intermediate_size"}
SHARED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "initializer_range",
    "tie_word_embeddings",
}  # fmt: skip
READS = {
    "llama": OF_DENSE | {"attention_bias", "mlp_bias"},
    "qwen2": OF_DENSE,
    "qwen3": OF_DENSE,
    "qwen3_moe": OF_MOE,
    "qwen3_next": OF_MOE | OF_DELTA_NET | {"shared_expert_intermediate_size", "partial_rotary_factor"},
    "qwen3_5_text": OF_DENSE | OF_DELTA_NET | {"partial_rotary_factor"},
    "qwen3_5_moe_text": (OF_MOE | OF_DELTA_NET | {"shared_expert_intermediate_size", "partial_rotary_factor"})
    - {"norm_topk_prob"},
    "glm4_moe": OF_DENSE | {name for name in OTHERS if name.startswith(("n_", "first_", "routed_", "use_"))}
    | {"moe_intermediate_size", "num_experts_per_tok", "attention_bias", "num_nextn_predict_layers",
       "partial_rotary_factor"},
    "gpt_oss": OF_DENSE | {"num_local_experts", "num_experts_per_tok", "sliding_window", "attention_bias"},
    "olmo2": OF_DENSE | {"attention_bias"},
}  # fmt: skip
"""Family → the fields that it reads beside the shared ones."""
NOTHING = {"glm4_moe": {"head_dim": 128}}
"""Family → fields of a file that says nothing else. GLM's defaults give heads of 42 elements, of which half
rotate: an odd number, which is refused."""
WRAPPING = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ROPES = (
    {}, {"rope_parameters": {}}, {"rope_parameters": {"rope_theta": 3e4}},
    {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 3e4, "truncate": False}},
    {"rope_theta": 2e4, "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16.0}},
)  # fmt: skip


def read(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return read_hf_config(directory)


def in_transformers(config):
    """Return the numbers of a shape as the family's class in transformers has them."""
    from transformers import CONFIG_MAPPING

    own = CONFIG_MAPPING[config["model_type"]](**json.loads(json.dumps(config)))
    rope, size = own.rope_parameters, own.hidden_size // own.num_attention_heads
    head_dim = getattr(own, "head_dim", None) or size
    wanted = {
        "vocab_size": own.vocab_size, "hidden_size": own.hidden_size, "num_layers": own.num_hidden_layers,
        "num_attention_heads": own.num_attention_heads, "num_key_value_heads": own.num_key_value_heads,
        "head_dim": head_dim, "max_position_embeddings": own.max_position_embeddings,
        "rms_norm_eps": own.rms_norm_eps, "tie_word_embeddings": own.tie_word_embeddings,
        "initializer_range": own.initializer_range, "rope_theta": rope["rope_theta"],
        "rotary_dim": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope_scaling": scaling_of(rope),
    }  # fmt: skip
    return wanted | of_family(own, config["model_type"])


def scaling_of(rope):
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] == "linear":
        return RopeScaling("linear", rope["factor"])
    betas = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
    original = rope["original_max_position_embeddings"]
    return RopeScaling("yarn", rope["factor"], original, *betas, rope.get("truncate", True))


def of_family(own, family):
    moe = family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
    found = {}
    if moe:
        found |= {"num_experts": own.num_experts, "experts_per_token": own.num_experts_per_tok,
                  "expert_hidden_size": own.moe_intermediate_size,
                  "normalize_expert_weights": getattr(own, "norm_topk_prob", True)}  # fmt: skip
    elif family in ("glm4_moe", "gpt_oss"):
        found |= {"experts_per_token": own.num_experts_per_tok}
    else:
        found |= {"ffn_hidden_size": own.intermediate_size}
    if hasattr(own, "linear_num_key_heads"):
        found |= {"gdn_key_heads": own.linear_num_key_heads, "gdn_value_heads": own.linear_num_value_heads,
                  "gdn_key_dim": own.linear_key_head_dim, "gdn_value_dim": own.linear_value_head_dim,
                  "gdn_conv_kernel": own.linear_conv_kernel_dim,
                  "full_attention": tuple(kind == "full_attention" for kind in own.layer_types)}  # fmt: skip
        if moe:
            found["shared_expert_hidden_size"] = own.shared_expert_intermediate_size
    if family == "glm4_moe":
        found |= {"num_experts": own.n_routed_experts, "expert_hidden_size": own.moe_intermediate_size,
                  "shared_expert_hidden_size": own.n_shared_experts * own.moe_intermediate_size,
                  "dense_layers": own.first_k_dense_replace, "qkv_bias": own.attention_bias,
                  "routed_scaling_factor": own.routed_scaling_factor, "query_key_norms": own.use_qk_norm,
                  "ffn_hidden_size": own.intermediate_size,
                  "carried": tuple(f"model.layers.{own.num_hidden_layers + layer}."
                                   for layer in range(own.num_nextn_predict_layers))}  # fmt: skip
    if family == "gpt_oss":
        found |= {"num_experts": own.num_local_experts, "expert_hidden_size": own.intermediate_size,
                  "windows": tuple(own.sliding_window if kind == "sliding_attention" else None
                                   for kind in own.layer_types)}  # fmt: skip
    if family in ("llama", "olmo2"):
        found |= {"qkv_bias": own.attention_bias, "attention_output_bias": own.attention_bias}
    if family == "llama":
        found["mlp_bias"] = own.mlp_bias
    return found


def compare(directory, config):
    wanted = in_transformers(config)
    try:
        shape = read(directory, config)
    except ModelConfigError as refused:
        return str(refused)
    assert {name: getattr(shape, name) for name in wanted} == wanted
    return None


@pytest.mark.parametrize("family", READS)
def test_each_field_alone_may_be_absent_and_all_of_them(tmp_path, family):
    """Read as transformers does; only numbers that do not fit each other are refused."""
    full = {name: OTHERS[name] for name in sorted(SHARED | READS[family])} | {"model_type": family}
    empty = {"model_type": family} | NOTHING.get(family, {})
    assert compare(tmp_path, empty) is None
    assert compare(tmp_path, full) is None
    for name in full.keys() - {"model_type"}:
        refused = compare(tmp_path, {key: value for key, value in full.items() if key != name})
        assert refused is None or "is no multiple of" in refused, (name, refused)
        assert compare(tmp_path, empty | {name: full[name]}) is None or name in (
            "num_key_value_heads", "num_attention_heads", "linear_num_key_heads", "linear_num_value_heads",
            "hidden_size",
        ), name  # fmt: skip


@pytest.mark.parametrize("family", READS)
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_the_rotation_has_the_family_s_defaults_in_every_spelling(tmp_path, family, rope):
    refused = compare(tmp_path, {"model_type": family, **NOTHING.get(family, {}), **rope})
    scaled = {"rope_type", "type"} & {*rope.get("rope_scaling", {}), *rope.get("rope_parameters", {})}
    partly = family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe")
    assert (refused is not None) == bool(scaled and partly), refused


def test_gpt_oss_has_its_published_rotation_by_default(tmp_path):
    shape = read(tmp_path, {"model_type": "gpt_oss"})
    assert (shape.rope_theta, shape.rope_scaling) == (1.5e5, RopeScaling("yarn", 32.0, 4096, truncate=False))


@pytest.mark.parametrize("family", WRAPPING)
def test_a_wrapped_text_model_has_the_defaults_of_its_text(tmp_path, family):
    wanted = in_transformers({"model_type": WRAPPING[family]})
    shape = read(tmp_path, {"model_type": family, "text_config": {}})
    assert {name: getattr(shape, name) for name in wanted} == wanted
    for outer, inner in (({"tie_word_embeddings": True}, {}), ({}, {"tie_word_embeddings": True})):
        with pytest.raises(ModelConfigError, match=r"tie_word_embeddings is \w+, and \w+ in text_config"):
            read(tmp_path, {"model_type": family, "text_config": inner, **outer})


def test_other_names_of_transformers_for_glm_are_read(tmp_path):
    names = {"num_mtp_layers": 3, "num_local_experts": 8, "head_dim": 64}
    assert compare(tmp_path, {"model_type": "glm4_moe", **names}) is None


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"kinds of layers \(full_attention\)"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 2}},
         "rope_scaling and rope_parameters differ"),
    ],
)  # fmt: skip
def test_a_rotation_that_would_be_left_out_is_refused(tmp_path, rope, words):
    with pytest.raises(ModelConfigError, match=words):
        read(tmp_path, {"model_type": "qwen3", **rope})


def test_every_family_is_compared():
    assert READS.keys() | WRAPPING.keys() == FAMILIES.keys()
