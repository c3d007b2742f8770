"""The layers that Transformer Engine would provide have the names, shapes and marks of the local ones.

Transformer Engine needs a GPU. Its classes are stood in for (`te_stand_in`), Megatron's own wrappers around
them are real, and both models are built on the meta device as rank 0 of a TP2 layout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT, TESTS
from support.tiny_models import make_gpt_oss, make_qwen3, make_qwen3_next


def build_both(config_dir, tp, ep):
    command = [sys.executable, "-W", "ignore", TESTS / "support/te_stand_in.py", config_dir, str(tp), str(ep)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return build_both(make_qwen3_next(tmp_path_factory.mktemp("next"), 0), tp=2, ep=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return build_both(make_qwen3(tmp_path_factory.mktemp("dense"), 0), tp=2, ep=1)


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """With sinks, and experts that have biases."""
    return build_both(make_gpt_oss(tmp_path_factory.mktemp("oss"), 0), tp=2, ep=2)


@pytest.mark.parametrize("what", ["parameters", "marks", "checkpoint"])
@pytest.mark.parametrize("model", ["hybrid", "dense", pytest.param("biased", marks=pytest.mark.slow)])
def test_both_back_ends_agree(request, model, what):
    built = request.getfixturevalue(model)
    assert built["te"][what] == built["local"][what]
    assert len(built["te"][what]) > 10


def test_transformer_engines_classes_serve_where_the_spec_says(hybrid, dense):
    layer, attention, mlp = "decoder.layers.3", "decoder.layers.3.self_attention", "decoder.layers.3.mlp"
    expected = {
        f"{attention}.linear_qkv": "TELayerNormColumnParallelLinear",
        f"{attention}.core_attention": "TEDotProductAttention",
        f"{attention}.q_layernorm": "RMSNorm",
        f"{attention}.linear_proj": "TERowParallelLinear",
        "decoder.layers.0.self_attention.in_proj": "TELayerNormColumnParallelLinear",
        "decoder.layers.0.self_attention.out_norm": "RMSNorm",
        "decoder.layers.0.self_attention.out_proj": "TERowParallelLinear",
        f"{layer}.pre_mlp_layernorm": "RMSNorm",
        f"{mlp}.experts": "TEGroupedMLP",
        f"{mlp}.experts.linear_fc1": "TEColumnParallelGroupedLinear",
        f"{mlp}.experts.linear_fc2": "TERowParallelGroupedLinear",
        f"{mlp}.shared_experts.linear_fc1": "TEColumnParallelLinear",
        f"{mlp}.shared_experts.linear_fc2": "TERowParallelLinear",
        "decoder.final_layernorm": "RMSNorm",
    }
    assert {name: hybrid["te"]["classes"][name] for name in expected} == expected
    assert dense["te"]["classes"]["decoder.layers.0.mlp.linear_fc1"] == "TELayerNormColumnParallelLinear"
    assert dense["te"]["classes"]["decoder.layers.0.mlp.linear_fc2"] == "TERowParallelLinear"


def test_only_the_delta_nets_output_norm_is_not_zero_centred(hybrid, dense):
    for built in (hybrid["te"], hybrid["local"]):
        not_centred = {name for name, centred in built["centred"].items() if not centred}
        assert not_centred == {f"decoder.layers.{layer}.self_attention.out_norm" for layer in range(3)}
    assert not any(dense["te"]["centred"].values())


def test_fused_adam_serves_where_transformer_engine_is(hybrid):
    assert hybrid["optimizer"] == "FusedAdam"
