"""A run with Transformer Engine's layers saves and loads. The layers are stood in for (`te_stand_in`), with
what theirs do in a state dict; Megatron's wrappers, its optimizer and its checkpoints are real."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support.paths import ROOT, TESTS
from support.tiny_models import make_qwen3_next


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("te")
    hf_dir = make_qwen3_next(scratch / "hf", 0)
    hf_to_megatron(hf_dir, scratch / "converted", ParallelConfig(), World(0, 1, torch.device("cpu"), None))
    command = [sys.executable, "-W", "ignore", "-m", "support.te_checkpoints"]
    command += map(str, (hf_dir, scratch / "converted", scratch))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_goes_on_from_its_checkpoint_under_transformer_engine(found):
    """Weights, the optimizer's means and its count of steps, and what the next step makes of them."""
    assert found["extra states"] > 20
    assert found["saved, loaded"] == []
    assert found["and the step after"] == []


def test_the_scales_of_fp8_come_back_where_the_layout_is_the_same(found):
    """They are equal to the bit, for every expert in a grouped module too. Attention in FP8 has some that
    Megatron does not put into its checkpoints."""
    assert found["with scales"] > 20
    assert found["scales of experts"] > 10
    assert found["scales that differ"] == ["module.decoder.layers.3.self_attention.core_attention"]
    assert found["notes"] == found["without FP8"] == []


def test_scales_that_are_not_restored_are_said_to_form_anew(found):
    names, (note,) = found["of another layout"]
    assert names == []
    assert "step_000003 was saved with tensor_model_parallel_size 1; they settle again" in note
    names, (note,) = found["of a conversion"]
    assert names == []
    assert "FP8 scales are not restored" in note


def test_scales_that_would_run_code_are_refused(found):
    assert "is damaged or unsafe, and was not read" in found["unsafe"]
    assert "builtins.print" in found["unsafe"]


def test_a_checkpoint_without_extra_state_is_loaded_under_transformer_engine(found):
    assert found["converted, loaded"] == []


def test_a_weight_that_no_checkpoint_fills_is_refused(found):
    assert "missing decoder.layers.3.self_attention.q_layernorm.weight" in found["without a weight"]
