"""Transformer Engine's layers have the names, shapes and marks of the local ones. Its classes, which need a
GPU, are stood in for (`te_stand_in`); Megatron's own wrappers around them are real. Both models are built on
the meta device as rank 0 of a TP2 layout."""

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
    first, last = "decoder.layers.0.self_attention", "decoder.layers.3.self_attention"
    mlp, shared, dense = "decoder.layers.3.mlp", "decoder.layers.3.mlp.shared_experts", "decoder.layers.0.mlp"
    expected = {
        "TELayerNormColumnParallelLinear": {f"{last}.linear_qkv", f"{first}.in_proj"},
        "TERowParallelLinear": {f"{last}.linear_proj", f"{first}.out_proj", f"{shared}.linear_fc2"},
        "TEColumnParallelLinear": {f"{shared}.linear_fc1"},
        "TEDotProductAttention": {f"{last}.core_attention"},
        "TEGroupedMLP": {f"{mlp}.experts"},
        "TEColumnParallelGroupedLinear": {f"{mlp}.experts.linear_fc1"},
        "TERowParallelGroupedLinear": {f"{mlp}.experts.linear_fc2"},
        "RMSNorm": {f"{last}.q_layernorm", f"{first}.out_norm", "decoder.layers.3.pre_mlp_layernorm",
                    "decoder.final_layernorm"},
    }  # fmt: skip
    for kind, names in expected.items():
        assert {built["hybrid"]["te"]["classes"][name] for name in names} == {kind}
    classes = built["dense"]["te"]["classes"]
    assert classes[f"{dense}.linear_fc1"] == "TELayerNormColumnParallelLinear"
    assert classes[f"{dense}.linear_fc2"] == "TERowParallelLinear"
    assert built["hybrid"]["optimizer"] == "FusedAdam"


def test_only_the_delta_nets_output_norm_is_not_zero_centred(built):
    for library in ("te", "local"):
        centred = built["hybrid"][library]["centred"]
        not_centred = {name for name in centred if not centred[name]}
        assert not_centred == {f"decoder.layers.{layer}.self_attention.out_norm" for layer in range(3)}
    assert not any(built["dense"]["te"]["centred"].values())
