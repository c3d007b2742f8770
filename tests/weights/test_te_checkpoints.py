"""The layers of Transformer Engine are stood in for (`te_stand_in`), with what theirs do in a state dict;
Megatron's wrappers, its optimizer and its checkpoints are real."""

import json
import os
import subprocess
import sys

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support.conversions import ALONE
from support.paths import ROOT, TESTS
from support.tiny_models import make_qwen3_next


def test_a_run_with_transformer_engine_goes_on_from_checkpoints(tmp_path):
    hf_dir = make_qwen3_next(tmp_path / "hf", 0)
    hf_to_megatron(hf_dir, tmp_path / "converted", ParallelConfig(), ALONE)
    command = [sys.executable, "-W", "ignore", "-m", "support.te_checkpoints"]
    command += map(str, (hf_dir, tmp_path / "converted", tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

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
