"""Methods that ask for further samples or passes, and an engine of one's own, run three real steps."""

import json
import math

import pytest

from support.documented_modules import write_modules
from support.example_runs import finished, rows_of, start_script
from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2000)]

SMALL = [
    "--num-rollout", "3", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-trainers", "1",
    "--num-steps-per-rollout", "1", "--eval-num-prompts", "0", "--vllm-dtype", "float32",
]  # fmt: skip


def steps_of(run_dir, *flags, **settings):
    """The metrics of each step of a run."""
    status, output = finished(start_script(run_dir, *SMALL, *flags, script="run.sh", **settings), 900)
    assert status == 0, output[-5000:]
    rows = rows_of(run_dir)
    assert rows[-1]["step"] == 3
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm", "entropy"))
    assert all(row["updates_skipped"] == 0 for row in rows)
    return rows


def recipe(name):
    return "--config", str(ROOT / "examples/algorithms" / f"{name}.yaml")


def test_a_gated_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    every = ("--save-interval", "1", "--keep-checkpoints", "3")
    whole = steps_of(tmp_path / "whole", *recipe("ibpo_gated"), *every)
    checkpoint = tmp_path / "whole/checkpoints/step_000002"
    remembered = json.loads((checkpoint / "run_state.json").read_text())["remembered"]
    assert sum(tries for _, tries in remembered.values()) > 0
    again = ("--load", str(checkpoint), "--no-save")
    resumed = steps_of(tmp_path / "resumed", *recipe("ibpo_gated"), *again)
    assert sum(row["gated_pairs"] for row in whole) > 0
    for name in ("reward", "corrections", "gated_pairs", "tokens_corrections"):
        assert resumed[-1].get(name) == whole[-1].get(name), name


@pytest.mark.parametrize("name", ["ibpo_plain_prompt", "critique_grpo"])
def test_corrections_are_trained_on_under_the_plain_prompt(name, tmp_path):
    rows = steps_of(tmp_path / "run", *recipe(name), "--no-save")
    assert sum(row["joined_corrections"] for row in rows) > 0
    for row in rows:
        assert row["joined_corrections"] <= row["corrections"]
        assert row.get("tokens_trained_corrections", 0) <= row["tokens_trained"]


def test_the_teachers_passes_are_counted(tmp_path):
    """All tokens spent by the first step: prompts read, responses written, the teacher's passes, training."""
    first, *_ = steps_of(tmp_path / "run", *recipe("self_teacher"), "--no-save")
    assert first["teacher_tokens"] > 0
    others = sum(first[name] for name in ("tokens_responses", "teacher_tokens", "tokens_trained"))
    assert 8 * 5 < first["spent_tokens"] - others < 8 * 40


def test_wrong_responses_are_begun_again(tmp_path):
    rows = steps_of(tmp_path / "run", *recipe("reset_groups"), "--no-save")
    assert sum(row["reset_suffixes"] for row in rows) > 0
    assert all(row["reset_reward_errors"] == 0 for row in rows)
    assert any(row.get("reset_shared_length", 0) > 0 for row in rows)


def test_an_engine_of_ones_own_samples_a_run_under_ray(tmp_path):
    """The one of docs/extending.md, as its page says: a file in the directory where one stands."""
    write_modules(tmp_path)
    steps_of(tmp_path / "run", "--rollout-backend", "counted_engine:CountedEngine", directory=tmp_path)
    counts = (tmp_path / "run/logs/engine_0.requests").read_text().split()
    assert sum(map(int, counts)) >= 3 * 8 * 4, "every response and correction"
