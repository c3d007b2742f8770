"""Training raises the reward: whole runs of two back ends, from samples to weights and back."""

import os
from pathlib import Path
from statistics import mean

import pytest

from megatron_ibpo.commands import train
from support.example_runs import rows_of
from support.paths import ROOT, TESTS

FLAGS = (
    "--config", "examples/recipes/tiny_qwen3_study.yaml", "--num-trainers", "1",
    "--rm-type", "test_learning:minus_signs", "--reward-threshold", "0.6", "--reward-workers", "1",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "8",
    "--rollout-temperature", "3", "--num-steps-per-rollout", "1",
    "--lr", "1.5e-3", "--num-rollout", "10", "--eval-num-prompts", "0", "--seed", "0",
)  # fmt: skip


def minus_signs(question, response, label, metadata):
    """Return the share of minus signs among eight characters, of which the policy writes few."""
    return response.count("-") / max(8, len(response))


IBPO_ON_RAY = pytest.param("transformers", "ibpo", marks=[pytest.mark.ray, pytest.mark.slow])


@pytest.mark.forked
@pytest.mark.parametrize(("backend", "preset"), [("lean", "gspo"), IBPO_ON_RAY])
def test_ten_steps_raise_a_reward_of_a_tenth_to_four_tenths(tmp_path, backend, preset):
    """The bounds leave a margin: .12 and .45 with this seed, .12 and .41 with the next."""
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, TESTS, Path(__file__).parent)))
    flags = ["--rollout-backend", backend, "--advantage-estimator", preset, "--run-dir", str(tmp_path)]
    assert train.main([*FLAGS, *flags]) == 0
    rewards = [row["reward"] for row in rows_of(tmp_path)]
    assert len(rewards) == 10
    assert mean(rewards[:3]) < 0.2
    assert mean(rewards[-3:]) > 0.3
