"""A whole evaluation through the command: killed in the middle, and of a Megatron checkpoint."""

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


def start(policy, run_dir):
    sums = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
    words = [  # float32, where what is sampled does not depend on which other requests run beside it
        policy, "--run-dir", run_dir, "--eval-prompt-data", f"sums={sums}",
        f"short={sums.replace('5', '2').replace('7', '3')}", "--eval-num-prompts", 12,
        "--n-samples-per-eval-prompt", 3, "--eval-compare-and-correct", "--eval-max-response-len", 48,
        "--rollout-max-response-len", 48, "--vllm-dtype", "float32",
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_ibpo.commands.evaluate", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finished(policy, run_dir):
    """Run it; return what it says, what was measured of each set, and all responses."""
    process = start(policy, run_dir)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-5000:]
    results = json.loads((run_dir / "results.json").read_text())
    assert results["status"] == "finished"
    samples = [sample for name in ("sums", "short") for sample in read_samples(run_dir, name)]
    measured = {name: (entry["measures"], entry["problems"]) for name, entry in results["sets"].items()}
    return output, measured, {(sample.set, *sample.key): sample.text for sample in samples}


def lines_of(run_dir):
    return sum(path.read_bytes().count(b"\n") for path in run_dir.glob("*.samples.jsonl"))


@pytest.mark.engine
@pytest.mark.slow  # test_evaluate.py kills it at many places, with a simulated engine
@pytest.mark.timeout(900)
def test_an_evaluation_that_is_killed_comes_to_the_same_as_one_of_the_converted_checkpoint(tmp_path):
    stored, whole, killed = (tmp_path / name for name in ("stored", "whole", "killed"))
    hf_to_megatron(TINY, stored, ParallelConfig(), World(0, 1, torch.device("cpu"), None))
    output, *expected = finished(stored, whole)
    assert f"converting {stored} to Hugging Face format in {whole}/policy-" in output
    assert list(whole.glob("policy-*")) == [], "removed at the end"
    assert "sums: accuracy " in output
    assert (whole / "evaluation.png").exists()
    in_all = 2 * 12 * (3 + 1 + 3)  # of both sets: samples, greedy ones and corrections
    assert len(expected[1]) == lines_of(whole) == in_all

    process = start(TINY, killed)
    while lines_of(killed) < 20:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=30)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=10)
    kept = lines_of(killed)
    assert 20 <= kept < in_all
    output, *found = finished(TINY, killed)
    assert f"{kept} samples of an earlier start are reused" in output
    assert found == expected
