"""Transformer Engine needs a GPU. Its classes are stood in for (`te_stand_in`), with what theirs do in a
state dict; Megatron's own wrappers around them, its optimizer and its checkpoints are real."""

import json
import os
import subprocess
import sys

import pytest

from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support.conversions import ALONE
from support.layouts import layout
from support.paths import ROOT, TESTS
from support.tiny_models import make_gpt_oss, make_qwen3, make_qwen3_next


def said_by(*program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    command = [sys.executable, "-W", "ignore", *map(str, program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What models are with these layers and with local ones, on the meta device as rank 0 of a TP2 layout."""
    directory = tmp_path_factory.mktemp("models")
    models = {
        "hybrid": f"{make_qwen3_next(directory / 'next', 0)}:2",
        "dense": f"{make_qwen3(directory / 'dense', 0)}:1",
        "biased": f"{make_gpt_oss(directory / 'oss', 0)}:2",  # sinks, and experts that have biases
    }
    said = said_by(TESTS / "support/te_stand_in.py", *models.values())
    return dict(zip(models, said, strict=True))


def test_both_back_ends_agree(built):
    for model in built.values():
        for what in ("parameters", "marks", "checkpoint"):
            assert model["te"][what] == model["local"][what]
            assert len(model["te"][what]) > 10


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


def test_a_run_with_transformer_engine_goes_on_from_checkpoints(tmp_path):
    hf_dir = make_qwen3_next(tmp_path / "hf", 0)
    hf_to_megatron(hf_dir, tmp_path / "converted", layout(), ALONE)
    found = said_by("-m", "support.te_checkpoints", hf_dir, tmp_path / "converted", tmp_path)
    # weights, the optimizer's means and its count of steps, and what the next step makes of them
    assert found["extra states"] > 20
    assert found["saved, loaded"] == found["and the step after"] == []
    # FP8's scales come back to the bit, for every expert in a grouped module too, where the layout is the
    # same; attention has some that Megatron does not put into its checkpoints
    assert found["with scales"] > 20
    assert found["scales of experts"] > 10
    assert found["scales that differ"] == ["module.decoder.layers.3.self_attention.core_attention"]
    assert found["notes"] == found["without FP8"] == []
    # elsewhere it is said that they form anew
    for checkpoint, words in (
        ("of another layout", "step_000003 was saved with tensor_model_parallel_size 1; they settle again"),
        ("of a conversion", "FP8 scales are not restored"),
    ):
        names, (note,) = found[checkpoint]
        assert names == []
        assert words in note
    assert "is damaged or unsafe, and was not read" in found["unsafe"]
    assert "builtins.print" in found["unsafe"]
    assert found["converted, loaded"] == [], "a checkpoint without extra state is loaded"
    assert "missing decoder.layers.3.self_attention.q_layernorm.weight" in found["without a weight"]
