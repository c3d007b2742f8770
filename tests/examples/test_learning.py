"""Training raises the reward: whole runs of two back ends, from samples to weights and back."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from megatron_ibpo.commands import train
from support.example_runs import rows_of
from support.paths import ROOT, TESTS

FLAGS = (
    "--config", "examples/recipes/tiny_qwen3_study.yaml",
    "--rm-type", "test_learning:minus_signs", "--reward-threshold", "0.6", "--reward-workers", "1",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "8",
    "--rollout-temperature", "3", "--num-steps-per-rollout", "1",
    "--lr", "1.5e-3", "--num-rollout", "10", "--eval-num-prompts", "0", "--seed", "0",
)  # fmt: skip


def minus_signs(question, response, label, metadata):
    """Return the share of minus signs among eight characters, of which the policy writes few."""
    return response.count("-") / max(8, len(response))


PATHS = os.pathsep.join(map(str, (ROOT, TESTS, Path(__file__).parent)))


@pytest.mark.forked
def test_ten_steps_quadruple_a_reward_of_a_tenth(tmp_path):
    """The bounds leave a margin: .12 and .45 with this seed, .12 and .41 with the next."""
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = PATHS
    method = ["--rollout-backend", "lean", "--advantage-estimator", "gspo"]
    assert train.main([*FLAGS, *method, "--run-dir", str(tmp_path)]) == 0
    check_learned(tmp_path)


@pytest.mark.ray
@pytest.mark.slow
def test_ibpo_with_the_transformers_engine_learns_as_much(tmp_path):
    method = ["--rollout-backend", "transformers", "--advantage-estimator", "ibpo", "--num-trainers", "1"]
    command = [sys.executable, "-m", "megatron_ibpo.commands.train", *FLAGS, *method]
    command += ["--run-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=400, env={**os.environ, "PYTHONPATH": PATHS})
    check_learned(tmp_path)


def check_learned(run_dir):
    rewards = [row["reward"] for row in rows_of(run_dir)]
    assert len(rewards) == 10
    assert mean(rewards[:3]) < 0.2
    assert mean(rewards[-3:]) > 0.3
