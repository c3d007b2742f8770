"""The layers that Transformer Engine would provide have the names, shapes and marks of the local ones.

Transformer Engine needs a GPU. Its classes are stood in for (`te_stand_in`), Megatron's own wrappers around
them are real, and both models are built on the meta device as rank 0 of a TP2 layout.
"""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT, TESTS
from support.tiny_models import make_gpt_oss, make_qwen3, make_qwen3_next


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return what `te_stand_in` says of each model."""
    directory = tmp_path_factory.mktemp("models")
    models = {
        "hybrid": f"{make_qwen3_next(directory / 'next', 0)}:2",
        "dense": f"{make_qwen3(directory / 'dense', 0)}:1",
        "biased": f"{make_gpt_oss(directory / 'oss', 0)}:2",  # sinks, and experts that have biases
    }
    command = [sys.executable, "-W", "ignore", TESTS / "support/te_stand_in.py", *models.values()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return dict(zip(models, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("what", ["parameters", "marks", "checkpoint"])
@pytest.mark.parametrize("model", ["hybrid", "dense", "biased"])
def test_both_back_ends_agree(built, model, what):
    engine, local = built[model]["te"][what], built[model]["local"][what]
    assert engine == local
    assert len(engine) > 10


def test_transformer_engines_classes_serve_where_the_spec_says(built):
    hybrid, dense = built["hybrid"], built["dense"]
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


def test_only_the_delta_nets_output_norm_is_not_zero_centred(built):
    for library in ("te", "local"):
        centred = built["hybrid"][library]["centred"]
        not_centred = {name for name in centred if not centred[name]}
        assert not_centred == {f"decoder.layers.{layer}.self_attention.out_norm" for layer in range(3)}
    assert not any(built["dense"]["te"]["centred"].values())


def test_fused_adam_serves_where_transformer_engine_is(built):
    assert built["hybrid"]["optimizer"] == "FusedAdam"
