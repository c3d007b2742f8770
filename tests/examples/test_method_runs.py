"""The methods that ask for further samples or passes, and an engine of one's own, three real steps each,
through the example script."""

import json
import math

import pytest

from support.documented_modules import write_modules
from support.example_runs import finished, rows_of, start_script
from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.ray]

SMALL = [
    "--num-rollout", "3", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--num-trainers", "1",
    "--num-steps-per-rollout", "1", "--eval-num-prompts", "0", "--vllm-dtype", "float32",
]  # fmt: skip


def steps_of(run_dir, recipe, *flags):
    """The metrics of each step of a run with this recipe."""
    config = ROOT / "examples/algorithms" / f"{recipe}.yaml"
    process = start_script(run_dir, "--config", str(config), *SMALL, *flags, script="run.sh")
    status, output = finished(process, 900)
    assert status == 0, output[-5000:]
    rows = rows_of(run_dir)
    assert rows[-1]["step"] == 3
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm", "entropy"))
    assert all(row["updates_skipped"] == 0 for row in rows)
    return rows


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_a_gated_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole = steps_of(tmp_path / "whole", "ibpo_gated", "--save-interval", "1", "--keep-checkpoints", "3")
    checkpoint = tmp_path / "whole/checkpoints/step_000002"
    remembered = json.loads((checkpoint / "run_state.json").read_text())["remembered"]
    assert sum(tries for _, tries in remembered.values()) > 0
    resumed = steps_of(tmp_path / "resumed", "ibpo_gated", "--load", str(checkpoint), "--no-save")
    assert sum(row["gated_pairs"] for row in whole) > 0
    for name in ("reward", "corrections", "gated_pairs", "tokens_corrections"):
        assert resumed[-1].get(name) == whole[-1].get(name), name


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("recipe", ["ibpo_plain_prompt", "critique_grpo"])
def test_corrections_are_trained_on_under_the_plain_prompt(recipe, tmp_path):
    rows = steps_of(tmp_path / "run", recipe, "--no-save")
    assert sum(row["joined_corrections"] for row in rows) > 0
    for row in rows:
        assert row["joined_corrections"] <= row["corrections"]
        assert row.get("tokens_trained_corrections", 0) <= row["tokens_trained"]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_teachers_passes_are_counted(tmp_path):
    """All tokens spent by the first step: prompts read, responses written, the teacher's passes, training."""
    first, *_ = steps_of(tmp_path / "run", "self_teacher", "--no-save")
    assert first["teacher_tokens"] > 0
    prompts = first["spent_tokens"] - sum(
        first[name] for name in ("tokens_responses", "teacher_tokens", "tokens_trained")
    )
    assert 8 * 5 < prompts < 8 * 40


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_wrong_responses_are_begun_again(tmp_path):
    rows = steps_of(tmp_path / "run", "reset_groups", "--no-save")
    assert sum(row["reset_suffixes"] for row in rows) > 0
    assert all(row["reset_reward_errors"] == 0 for row in rows)
    assert any(row.get("reset_shared_length", 0) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_an_engine_of_ones_own_samples_a_run_under_ray(tmp_path):
    """The one of docs/extending.md, as its page says: a file in the directory where one stands."""
    write_modules(tmp_path)
    run_dir, own = tmp_path / "run", ("--rollout-backend", "counted_engine:CountedEngine")
    status, output = finished(start_script(run_dir, *SMALL, *own, script="run.sh", directory=tmp_path), 900)
    assert status == 0, output[-5000:]
    assert rows_of(run_dir)[-1]["step"] == 3
    counts = [int(line) for line in (run_dir / "logs/engine_0.requests").read_text().split()]
    assert sum(counts) >= 3 * 8 * 4, "every response and correction"
