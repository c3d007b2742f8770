import json
import math
import re
from dataclasses import replace

import pytest

from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.models import ModelConfigError, check_layout, cost, read_hf_config
from megatron_ibpo.models.shape import RopeScaling
from support.layouts import layout
from support.paths import ROOT

NEXT_80B, LLAMA_31_8B, GLM_AIR, OSS_20B, WRAPPED, TINY = (
    json.loads((ROOT / "examples" / name / "config.json").read_text())
    for name in ("models/qwen3_next_80b_a3b", "models/llama_3_1_8b", "models/glm_4_5_air",
                 "models/gpt_oss_20b", "models/qwen3_5_0_8b", "tiny_qwen3")
)  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def write(directory, config):
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_published_configs_are_read_in_every_spelling(tmp_path):
    yarn_of_8b = {"rope_theta": 5e5, "rope_scaling": RopeScaling("yarn", 4.0, 32768)}
    new_yarn = {"rope_scaling": None, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5e5}}
    without_dense_layers = {"first_k_dense_replace": 0, "n_shared_experts": 2, "num_nextn_predict_layers": 0}
    turns = ((False,) * 3 + (True,)) * 12
    cases: tuple[tuple[dict, dict], ...] = (
        (NEXT_80B, {"family": "qwen3_next", "head_dim": 256, "rotary_dim": 64, "rope_theta": 1e7,
                    "num_experts": 512, "experts_per_token": 10, "expert_hidden_size": 512,
                    "gdn_key_heads": 16, "gdn_value_heads": 32, "full_attention": turns}),
        (WRAPPED, {"rotary_dim": 64, "full_attention": turns[:24], "tie_word_embeddings": True,
                   "hf_prefix": "model.language_model.", "carried": ("model.visual.",)}),
        (LLAMA_31_8B, {"head_dim": 128, "rotary_dim": 128, "rope_theta": 5e5,
                       "rope_scaling": RopeScaling("llama3", 8.0, 8192), "query_key_norms": False,
                       "qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}),
        # scaled positions in old and new spelling
        (LLAMA_31_8B | {"rope_scaling": YARN}, yarn_of_8b),
        (LLAMA_31_8B | new_yarn, yarn_of_8b),
        # Llama 2 7B is published so, and transformers writes missing values so
        (LLAMA_31_8B | {"num_key_value_heads": None, "head_dim": None, "attention_bias": True},
         {"num_key_value_heads": 32, "head_dim": 128, "qkv_bias": True, "attention_output_bias": True,
          "mlp_bias": False}),
        (GLM_AIR, {"head_dim": 128, "rotary_dim": 64, "rope_theta": 1e6, "query_key_norms": False,
                   "qkv_bias": True, "attention_output_bias": False, "ffn_hidden_size": 10944,
                   "moe_layers": 45, "num_experts": 128, "experts_per_token": 8, "expert_hidden_size": 1408,
                   "shared_expert_hidden_size": 1408, "shared_expert_gate": False,
                   "carried": ("model.layers.46.",)}),
        (GLM_AIR | without_dense_layers,
         {"moe_layers": 46, "shared_expert_hidden_size": 2816, "carried": ()}),
        *((OSS_20B | spelling,
           {"head_dim": 64, "rotary_dim": 64, "rope_theta": 1.5e5, "attention_sinks": True,
            "rope_scaling": RopeScaling("yarn", 32.0, 4096, truncate=False), "query_key_norms": False,
            "qkv_bias": True, "attention_output_bias": True, "expert_bias": True, "num_experts": 32,
            "tie_word_embeddings": False, "experts_per_token": 4, "expert_hidden_size": 2880,
            "moe_layers": 24}) for spelling in ({}, {"layer_types": None, "sliding_window": None})),
    )  # fmt: skip
    for config, expected in cases:
        shape = read_hf_config(write(tmp_path, config))
        assert {name: getattr(shape, name) for name in expected} == expected
        if shape.family == "gpt_oss":
            assert [shape.window(layer) for layer in range(24)] == [128, None] * 12, (config, expected)
        if config is GLM_AIR:
            assert [layer for layer in range(46) if not shape.has_experts(layer)] == [0], (config, expected)
    for config, end in ((WRAPPED, 248044), (WRAPPED | {"eos_token_id": 8}, 8)):
        assert read_eos_token_ids(write(tmp_path, config)) == (end,)


@pytest.fixture
def next_80b(tmp_path):
    return read_hf_config(write(tmp_path, NEXT_80B))


def test_a_config_that_cannot_be_built_is_refused(tmp_path):
    unsupported = (  # values that other models have, and which these would compute wrongly
        (GLM_AIR, {"n_group": 8, "topk_group": 4, "norm_topk_prob": False, "num_experts_per_tok": 1}),
        (GLM_AIR, {"tie_word_embeddings": True}),
        (OSS_20B, {"attention_bias": False, "attention_dropout": 0.1, "tie_word_embeddings": True}),
        (OSS_20B, {"swiglu_limit": 5.0, "swiglu_alpha": 1.0}),
        (NEXT_80B, {"attention_bias": True, "mlp_only_layers": [0]}),
        (LLAMA_31_8B, {"hidden_act": "gelu"}),
    )
    text = WRAPPED["text_config"]
    other_turns = ["full_attention", "sliding_attention"] * 12
    other_frequencies = LLAMA_31_8B["rope_scaling"] | {"high_freq_factor": 8}
    for config, words in (
        *((base | {name: value}, f"{name}={value!r} is not supported")
          for base, changes in unsupported for name, value in changes.items()),
        ("{", "not valid JSON"),
        (NEXT_80B | {"model_type": "gemma3"}, "model_type 'gemma3' is unknown; one of llama, "),
        (TINY | {"model_type": ["qwen3"]}, "model_type ['qwen3'] is unknown"),
        (TINY | {"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        (NEXT_80B | {"hidden_size": "2048"}, "hidden_size must be a positive integer, is '2048'"),
        (NEXT_80B | {"layer_types": ["full_attention"]}, "layer_types must name 48 layers"),
        (OSS_20B | {"layer_types": other_turns}, "sliding_attention and full_attention in turn for 24"),
        (GLM_AIR | {"first_k_dense_replace": 46}, "first_k_dense_replace=46 leaves no layer of 46 with"),
        (GLM_AIR | {"routed_scaling_factor": 0}, "routed_scaling_factor must be positive, is 0"),
        (OSS_20B | {"rope_scaling": OSS_20B["rope_scaling"] | {"truncate": 0}}, "truncate must be true or"),
        (NEXT_80B | {"rope_scaling": {"type": "yarn"}}, "yarn over 0.25 of a head is not supported"),
        (LLAMA_31_8B | {"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        (LLAMA_31_8B | {"rope_scaling": 3}, "rope_scaling must be an object"),
        (LLAMA_31_8B | {"rope_scaling": {"type": "linear"}}, "needs a factor of at least 1, has None"),
        (LLAMA_31_8B | {"rope_scaling": other_frequencies}, "high_freq_factor=8 is not supported: mega"),
        (LLAMA_31_8B | {"rope_scaling": YARN | {"attention_factor": 1.2}}, "attention_factor=1.2 is not"),
        (TINY | {"rope_parameters": {"partial_rotary_factor": 1e9}}, "is not an even number up to that"),
        (TINY | {"rms_norm_eps": math.nan}, "NaN is no number"),
        (TINY | {"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        (TINY | {"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' is not"),
        (TINY | {"vocab_size": 10**15}, "vocab_size must be at most 2147483647"),
        (WRAPPED | {"text_config": None}, "text_config must hold "),
        (WRAPPED | {"tie_word_embeddings": False}, "tie_word_embeddings is False, and True in text_config"),
        (WRAPPED | {"text_config": text | {"attn_output_gate": False}}, "attn_output_gate=False is not supp"),
        (WRAPPED | {"text_config": text | {"rope_parameters": {"rope_type": "yarn"}}}, "rope type yarn over"),
    ):  # fmt: skip
        with pytest.raises(ModelConfigError, match=re.escape(words)) as caught:
            read_hf_config(write(tmp_path, config))
        assert "config.json" in str(caught.value), (config, words)
    for place, words in ((tmp_path / "nowhere", "no checkpoint directory"), (ROOT, "holds no config.json")):
        with pytest.raises(ModelConfigError, match=words):
            read_hf_config(place)


def test_layouts_that_do_not_divide_are_refused(tmp_path, next_80b):
    """Heads and experts divide as Megatron divides them."""
    good, four, apart = layout(tp=2, pp=4, ep=8), layout(tp=4), layout(tp=2, sequence_parallel=False)
    oss, llama, tiny = (read_hf_config(write(tmp_path, config)) for config in (OSS_20B, LLAMA_31_8B, TINY))
    for shape, parallel, world_size, words in (
        (next_80b, layout(tp=3, pp=4, ep=8), 12, "does not divide the attention heads (16)"),
        (next_80b, layout(tp=2, pp=5, ep=8), 40, "does not divide the layers (48)"),
        (next_80b, layout(tp=2, pp=4, ep=3), 24, "does not divide the experts (512)"),
        (next_80b, layout(tp=2, pp=4, ep=8, etp=3), 96, "does not divide an expert's hidden size (512)"),
        (next_80b, layout(tp=2, cp=3), 32, "TP x PP x CP = 6 does not divide the world size (32)"),
        (next_80b, layout(tp=2, pp=4, ep=8, cp=16, delta_net_cp="heads"), 128,
         "--delta-net-cp heads: TP x CP=32 does not divide the delta net's key heads (16)"),
        (next_80b, apart, 32, "needs --sequence-parallel"),
        (next_80b, layout(tp=2, pp=4, ep=64), 32, "EP x ETP x PP = 256 does not divide the world size (32)"),
        (next_80b, good, 12, "TP x PP = 8 does not divide the world size (12)"),
        (next_80b, layout(tp=0, pp=4, ep=8), 32, "must be at least 1"),
        (next_80b, layout(vocabulary=0), 32, "--make-vocab-size-divisible-by=0: must be at least 1"),
        (replace(next_80b, num_attention_heads=12, num_key_value_heads=6), four, 4,
         "=4 is neither a divisor nor a multiple of the key/value heads (6)"),
        (replace(next_80b, num_key_value_heads=16, gdn_key_heads=2), four, 4,
         "--tensor-model-parallel-size=4 does not divide the delta net's key heads (2)"),
        (oss, layout(etp=2), 2, "=2: megatron-core does not divide experts with biases, which gpt_oss has; "),
        (tiny, layout(ep=2), 2, "qwen3 has no experts"),
        # each rank sees the norm behind delta nets with its own heads only
        (replace(next_80b, num_experts=0), apart, 2,
         "delta nets with --tensor-model-parallel-size > 1 need --sequence-parallel"),
    ):  # fmt: skip
        problems = check_layout(shape, parallel, world_size)
        assert any(words in problem for problem in problems), problems
    for shape, parallel, world_size in (
        (next_80b, good, 32), (next_80b, layout(), 1), (oss, layout(ep=8), 8), (llama, apart, 2),
        (next_80b, four, 4),  # two heads, each shared by two ranks
    ):  # fmt: skip
        assert check_layout(shape, parallel, world_size) == []


def test_ranks_divide_cached_heads_and_recurrent_layers_cache_none(tmp_path):
    shape = read_hf_config(write(tmp_path, OSS_20B))
    assert [cost.kv_elements(shape, 0, ranks) for ranks in (1, 4, 16)] == [2 * 8 * 64, 2 * 2 * 64, 2 * 64]
    assert cost.cached_elements(shape, 1000, 4) == 12 * 2 * 2 * 64 * (1000 + 128)
    hybrid = read_hf_config(write(tmp_path, NEXT_80B))
    assert [cost.kv_elements(hybrid, layer) for layer in range(4)] == [0, 0, 0, 2 * 2 * 256]
