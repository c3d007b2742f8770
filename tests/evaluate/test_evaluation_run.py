"""Whole evaluations through the command: killed in the middle, and of a Megatron checkpoint."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.evaluate.stored_samples import read_samples
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support.paths import ROOT

TINY = ROOT / "examples/tiny_qwen3"
SUMS = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
SETS = [f"sums={SUMS}", f"short={SUMS.replace('5', '2').replace('7', '3')}"]
PROMPTS, SAMPLES = 12, 3
IN_ALL = 2 * PROMPTS * (2 * SAMPLES + 1)
"""Of both sets: samples, greedy ones and corrections."""

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def start(policy, run_dir):
    """Start it in float32, where what is sampled does not depend on which other requests run beside it."""
    words = [
        policy, "--run-dir", run_dir, "--eval-prompt-data", *SETS, "--eval-num-prompts", PROMPTS,
        "--n-samples-per-eval-prompt", SAMPLES, "--eval-compare-and-correct", "--eval-max-response-len", 48,
        "--rollout-max-response-len", 48, "--vllm-dtype", "float32",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_ibpo.commands.evaluate", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finished(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-5000:]
    return output


def lines_of(run_dir):
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob("*.samples.jsonl"))


def found(run_dir):
    """(what was measured of each set, all responses)"""
    results = json.loads((run_dir / "results.json").read_text())
    assert results["status"] == "finished"
    samples = [sample for name in ("sums", "short") for sample in read_samples(run_dir, name)]
    measured = {name: (entry["measures"], entry["problems"]) for name, entry in results["sets"].items()}
    return measured, {(sample.set, *sample.key): sample.text for sample in samples}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("evaluation") / "whole"
    output = finished(start(TINY, run_dir))
    assert "sums: accuracy " in output
    assert (run_dir / "evaluation.png").exists()
    measured, responses = found(run_dir)
    assert len(responses) == lines_of(run_dir) == IN_ALL
    return measured, responses


def test_an_evaluation_that_is_killed_comes_to_the_same(undisturbed, tmp_path):
    process = start(TINY, tmp_path)
    while lines_of(tmp_path) < 20:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=30)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=10)
    kept = lines_of(tmp_path)
    assert 20 <= kept < IN_ALL
    output = finished(start(TINY, tmp_path))
    assert f"{kept} samples of an earlier start are reused" in output
    assert found(tmp_path) == undisturbed


def test_a_megatron_checkpoint_is_evaluated_as_what_it_was_converted_from(undisturbed, tmp_path):
    hf_to_megatron(TINY, tmp_path / "stored", ParallelConfig(), World(0, 1, torch.device("cpu"), None))
    output = finished(start(tmp_path / "stored", tmp_path / "out"))
    assert f"converting {tmp_path}/stored to Hugging Face format in {tmp_path}/out/policy-" in output
    assert list((tmp_path / "out").glob("policy-*")) == [], "removed at the end"
    assert found(tmp_path / "out")[0] == undisturbed[0]
