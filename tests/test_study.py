"""Comparing methods: what the statistics say, what a study plans, how its runs end."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_ibpo.config import ConfigError
from megatron_ibpo.study import Study, read_study, runs
from megatron_ibpo.study.conduct import conduct
from megatron_ibpo.study.curves import band, plot_comparison
from megatron_ibpo.study.plan import PlannedRun, plan_main, plan_tuning
from megatron_ibpo.study.results import RunResult, best_setting, compare, write_results
from megatron_ibpo.study.statistics import cost_to_reach, mean_with_interval, paired_difference
from megatron_ibpo.study.table import markdown_table

ROOT = Path(__file__).resolve().parents[1]
STUDIES = [path for path in sorted((ROOT / "examples/studies").glob("*.yaml")) if path.stem != "suite"]


# ------------------------------------------------------------------------------------------------ statistics


def outcomes(rng, seeds, problems, accuracy, between_seeds=0.0, between_problems=0.0):
    """[seeds, problems] of 0 and 1 around `accuracy`, with effects of seed and problem on it."""
    chance = accuracy + between_seeds * rng.normal(size=(seeds, 1))
    chance = np.clip(chance + between_problems * rng.normal(size=(1, problems)), 0, 1)
    return (rng.random((seeds, problems)) < chance).astype(float)


@pytest.mark.slow
def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Over 60 studies of 8 seeds, whose runs and problems both vary."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        found = mean_with_interval(outcomes(rng, 8, 120, 0.6, between_seeds=0.06, between_problems=0.1))
        covered += found.low <= 0.6 <= found.high
    assert 50 <= covered <= 60


def test_seeds_and_problems_both_widen_the_interval():
    """Where every seed solves the same problems there are 400 outcomes and not 2000; where seeds differ there
    are five. Where neither matters the interval is too wide, by at most the square root of 3."""
    rng = np.random.default_rng(1)
    alike = outcomes(rng, 5, 400, 0.6)
    found = {
        "neither": mean_with_interval(alike),
        "problems": mean_with_interval(np.repeat(alike[:1], 5, axis=0)),
        "seeds": mean_with_interval(outcomes(rng, 5, 400, 0.6, between_seeds=0.15)),
    }
    width = {name: estimate.high - estimate.low for name, estimate in found.items()}
    one_outcome = 2 * 1.96 * math.sqrt(0.6 * 0.4)
    assert width["problems"] == pytest.approx(one_outcome / math.sqrt(400), rel=0.1)
    assert 1 < width["neither"] / (one_outcome / math.sqrt(2000)) < 1.15 * math.sqrt(3)
    assert width["seeds"] > 2 * width["neither"]


def test_a_difference_is_paired():
    """The same luck of seed and problem in both: it cancels, and a constant gain is seen for what it is."""
    rng = np.random.default_rng(2)
    base = outcomes(rng, 5, 300, 0.5, between_seeds=0.1) * 0.5
    better = base + 0.1
    found = paired_difference(better, base)
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.bootstrap_p == pytest.approx(2 / 4001)
    assert paired_difference(base, better).mean == pytest.approx(-0.1)


@given(st.integers(2, 8))
@settings(max_examples=7, deadline=None)
def test_the_sign_flip_test_cannot_go_below_its_floor(seeds):
    base = np.zeros((seeds, 4))
    better = base + np.linspace(0.1, 0.2, seeds)[:, None]
    found = paired_difference(better, base)
    assert found.sign_flip_p == found.sign_flip_floor == 2 / 2**seeds
    if seeds == 5:
        assert found.sign_flip_floor == 0.0625


def test_sign_flips_by_hand():
    """Differences .1, .2, -.05: of their eight sums under flipped signs four are at least .25 from 0."""
    base = np.zeros((3, 2))
    method = np.array([[0.1, 0.1], [0.2, 0.2], [-0.05, -0.05]])
    signs = np.array(np.meshgrid(*[[1, -1]] * 3)).reshape(3, -1)
    sums = (signs * np.array([[0.1], [0.2], [-0.05]])).sum(0)
    assert (np.abs(sums) >= 0.25 - 1e-12).sum() == 4
    assert paired_difference(method, base).sign_flip_p == pytest.approx(4 / 8)


def test_no_difference_is_no_discovery():
    rng = np.random.default_rng(3)
    found = [
        paired_difference(outcomes(rng, 5, 80, 0.5), outcomes(rng, 5, 80, 0.5)).bootstrap_p for _ in range(12)
    ]
    assert np.mean(found) > 0.2
    same = outcomes(rng, 5, 80, 0.5)
    assert paired_difference(same, same).bootstrap_p == 1.0


def test_one_seed_has_an_interval_over_problems_and_no_sign_to_flip():
    solved = outcomes(np.random.default_rng(4), 1, 200, 0.5)
    found = paired_difference(solved, solved * 0.5)
    assert found.low < found.mean < found.high
    assert found.sign_flip_p == found.sign_flip_floor == 1.0
    with pytest.raises(ValueError, match="two of them"):
        mean_with_interval(solved[:, :1])
    with pytest.raises(ValueError, match="not paired"):
        paired_difference(solved, solved[:, :9])


def test_problems_that_the_verifier_failed_on_are_left_out():
    solved = np.tile([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]], 10)
    solved[0, 2] = np.nan
    assert mean_with_interval(solved).mean == pytest.approx(59 / 79)


def test_the_cost_of_a_threshold_is_where_the_smoothed_reward_crosses_it():
    spent = [10.0 * step for step in range(1, 9)]
    reward = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    # means of two: 0, .25, .5, .75, 1, 1, 1 at 20, 30, … 80
    assert cost_to_reach(0.75, spent, reward, window=2) == 50
    assert cost_to_reach(0.625, spent, reward, window=2) == pytest.approx(45)
    assert cost_to_reach(0.0, spent, reward, window=2) == 20
    assert cost_to_reach(1.01, spent, reward, window=2) == math.inf
    assert cost_to_reach(0.5, spent[:1], reward[:1], window=2) == math.inf


def test_a_band_covers_what_all_curves_cover():
    grid, mean, half = band([[(0, 0.0), (10, 1.0)], [(0, 0.0), (8, 0.4)]], points=5)
    assert grid.tolist() == [0, 2, 4, 6, 8]
    assert mean == pytest.approx((np.array([0, 0.2, 0.4, 0.6, 0.8]) + np.array([0, 0.1, 0.2, 0.3, 0.4])) / 2)
    assert half[0] == 0
    assert half[-1] == pytest.approx(12.706 * 0.2, rel=1e-3)  # Student's t of one degree of freedom


# ------------------------------------------------------------------------------------------------- the table


def result(method, seed, accuracy, *, problems=40, rewards=(0.2, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8)):
    solved = {problem: float(problem < accuracy * problems) for problem in range(problems)}
    return RunResult(
        method, seed, {}, 8, len(rewards),
        {"accelerator_seconds": 61.0, "tokens": 1e5, "flops": 1e11},
        [(0.0, 0.5), (61.0, accuracy)], accuracy,
        [(10.0 * (step + 1), reward) for step, reward in enumerate(rewards)],
        12.0, solved, {"gradient_snr": 0.01 * (seed + 1)},
    )  # fmt: skip


STUDY = Study("two", {"gspo": {}, "ibpo": {}}, baseline="gspo", budget=60.0, seeds=(0, 1, 2))


def test_the_table_puts_the_baseline_first_and_pairs_by_seed(tmp_path):
    slow = (0.2,) * 6 + (0.9,) * 5
    results = [result("ibpo", seed, 0.6 + 0.05 * seed, rewards=slow) for seed in (1, 0, 2)]
    results += [result("gspo", seed, 0.5 + 0.05 * seed) for seed in (0, 1, 2)]
    lines = compare(STUDY, results)
    assert [line["method"] for line in lines] == ["gspo", "ibpo"]
    assert lines[1]["difference"]["mean"] == pytest.approx(0.1)
    assert lines[1]["difference"]["sign_flip_p"] == 0.25
    assert lines[0]["cost_to_threshold"]["of_baseline"] == 1.0
    assert lines[1]["cost_to_threshold"]["of_baseline"] > 1.5
    assert lines[0]["gradient"] == {"gradient_snr": pytest.approx(0.02)}
    table = markdown_table(STUDY, lines)
    assert "+0.100 [+0.025, +0.175]" in table or "+0.100 [" in table
    assert "0.2500 (0.2500)" in table
    assert "at most 1.7% over" in table
    write_results(tmp_path / "results.json", STUDY, results, lines)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert len(kept["runs"]) == 6
    plot_comparison(STUDY, results, [tmp_path / "c.png", tmp_path / "c.svg"])
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_a_method_that_never_reaches_the_threshold_has_no_ratio():
    never = (0.1,) * 7
    lines = compare(STUDY, [result("gspo", 0, 0.5), result("ibpo", 0, 0.5, rewards=never)])
    assert lines[1]["cost_to_threshold"] == {"median": math.inf, "reached": 0, "of_baseline": None}
    assert "0/1 reached" in markdown_table(STUDY, lines)


def test_runs_tested_on_different_problems_are_not_compared():
    with pytest.raises(ValueError, match="same problems"):
        compare(STUDY, [result("gspo", 0, 0.5), result("gspo", 1, 0.5, problems=41)])
    with pytest.raises(ValueError, match="baseline"):
        compare(STUDY, [result("ibpo", 0, 0.5)])


def test_tuning_takes_the_value_with_the_best_mean():
    def tuned(value, *accuracies):
        run = PlannedRun("gspo", 100, Path("x"), (), "", 1.0, value)
        return [(run, result("gspo", 100, accuracy)) for accuracy in accuracies]

    assert best_setting([*tuned(1e-4, 0.6, 0.7), *tuned(3e-4, 0.9, 0.5), *tuned(1e-3, 0.1, 0.2)]) == 3e-4


# -------------------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_of_the_repository_can_be_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = read_study([path])
    runs_of = [*plan_tuning(study, tmp_path), *plan_main(study, tmp_path)]
    tuned = len(study.tune.values) * len(study.tune.seeds) if study.tune else 0
    assert len(runs_of) == len(study.methods) * (tuned + len(study.seeds))
    assert len({run.directory for run in runs_of}) == len(runs_of)


def minimal(tmp_path, **changes):
    content = {
        "recipe": str(ROOT / "examples/recipes/tiny_qwen3_study.yaml"),
        "budget": 10,
        "baseline": "gspo",
        "seeds": [0, 1],
        "common": {"hf-checkpoint": str(ROOT / "examples/tiny_qwen3")},
        "methods": {"gspo": {"advantage-estimator": "gspo"}, "ibpo": {"n-samples-per-prompt": 4}},
    } | changes
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def test_every_run_has_its_seed_its_budget_and_a_recipe_of_its_own(tmp_path):
    planned = plan_main(read_study([minimal(tmp_path)]), tmp_path / "out")
    assert [(run.method, run.seed) for run in planned] == [
        ("gspo", 0),
        ("ibpo", 0),
        ("gspo", 1),
        ("ibpo", 1),
    ]
    config = yaml.safe_load(planned[3].config)
    assert (config["seed"], config["data-seed"], config["budget"]) == (1, 1, 10)
    assert (config["advantage-estimator"], config["n-samples-per-prompt"]) == ("ibpo", 4)
    assert yaml.safe_load(planned[0].config)["ibpo-corrections"] == 0
    assert planned[3].directory == tmp_path / "out/runs/ibpo/seed_1"
    assert planned[3].directory.with_suffix(".yaml").exists()


def test_recipes_are_methods_too(tmp_path):
    base = yaml.safe_load((ROOT / "examples/recipes/tiny_qwen3_study.yaml").read_text())
    base["hf-checkpoint"] = str(ROOT / "examples/tiny_qwen3")
    for name in ("gspo", "ibpo"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(base | {"advantage-estimator": name}))
    paths = [tmp_path / "gspo.yaml", tmp_path / "ibpo.yaml"]
    study = read_study(paths, {"budget": 5.0, "baseline": "gspo", "seeds": 3})
    assert list(study.methods) == ["gspo", "ibpo"]
    assert len(plan_main(study, tmp_path / "out")) == 6
    with pytest.raises(ConfigError, match="needs baseline, budget"):
        read_study(paths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": "grpo"}, "'grpo' is none of the methods"),
        ({"budget": None}, "a study needs budget"),
        ({"budgett": 3}, "unknown key 'budgett'; did you mean 'budget'"),
        ({"seeds": [1, 1]}, "seeds must be different"),
        ({"tune": {"setting": "lr", "values": [1], "seeds": [0], "budget": 1}}, "study's own seeds"),
        ({"tune": {"setting": "lr"}}, "tune must have exactly budget, seeds, setting, values"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        read_study([minimal(tmp_path, **changes)])


def test_a_method_that_cannot_work_is_refused_before_anything_runs(tmp_path):
    methods = {"gspo": {"advantage-estimator": "gspo"}, "odd": {"ibpo-lamda": 1}}
    study = read_study([minimal(tmp_path, methods=methods)])
    with pytest.raises(ConfigError, match=r"method odd: .*did you mean 'ibpo-lambda'"):
        plan_main(study, tmp_path / "out")
    methods["odd"] = {"ibpo-lambda": 3.0}
    with pytest.raises(ConfigError, match="method odd: 1 problem"):
        plan_main(read_study([minimal(tmp_path, methods=methods)]), tmp_path / "out")


# -------------------------------------------------------------------------------------------- child processes

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(below.pid))
time.sleep(600)
"""


def planned(tmp_path):
    return PlannedRun("m", 0, tmp_path / "runs/seed_0", ("--none",), "key: value\n", 1.0)


def test_a_run_that_does_not_end_is_ended_with_all_it_started(tmp_path, monkeypatch):
    noted = tmp_path / "pid"
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, "-c", STUBBORN, str(noted)))
    monkeypatch.setattr(runs, "GRACE_S", 0.3)
    started = time.monotonic()
    assert runs.execute(planned(tmp_path), replace(STUDY, run_timeout=3.0), lambda row: None) == "timed out"
    assert time.monotonic() - started < 20
    below = int(noted.read_text())
    if psutil.pid_exists(below):
        process = psutil.Process(below)
        gone, _ = psutil.wait_procs([process], timeout=5)  # it was killed a moment ago
        assert gone or process.status() == psutil.STATUS_ZOMBIE


def test_a_run_that_fails_says_so_and_keeps_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, "-c", "print('why'); raise SystemExit(3)"))
    run = planned(tmp_path)
    assert runs.execute(run, STUDY, lambda row: None) == "failed"
    assert run.directory.with_suffix(".log").read_text() == "why\n"
    assert not runs.is_finished(run)


def test_a_finished_run_is_known_again_and_another_one_in_its_place_refused(tmp_path):
    run = planned(tmp_path)
    run.directory.mkdir(parents=True)
    run.directory.with_suffix(".config").write_text(run.config)
    summary = run.directory / "summary.json"
    summary.write_text('{"status": "interrupted"}')
    assert not runs.is_finished(run)
    summary.write_text('{"status": "finished"}')
    assert runs.is_finished(run)
    with pytest.raises(ConfigError, match="other settings"):
        runs.is_finished(replace(run, config="key: other\n"))


def test_two_processes_do_not_work_on_one_study(tmp_path):
    study = read_study([minimal(tmp_path)])
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(60)"
    )
    (tmp_path / "out").mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "out/lock")], stdout=subprocess.PIPE
    )
    try:
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another process"):
            conduct(study, tmp_path / "out", Console(file=io.StringIO()))
    finally:
        other.kill()
        other.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_comparison_from_its_recipe_to_its_table_stopped_and_resumed(tmp_path):
    """examples/studies/mini.yaml cut to one step a run, through the command that a user types."""
    content = yaml.safe_load((ROOT / "examples/studies/mini.yaml").read_text())
    content |= {"budget": 1, "common": {"eval-num-prompts": 16, "rollout-batch-size": 4}}
    content["name"] = "mini"
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "tools/compare_methods.py", str(tmp_path / "mini.yaml")]
    command += ["--save", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def compare_methods(*flags, status):
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    first = compare_methods("--runs-at-most", "1", status=1)
    assert "0 of 2 runs are there already" in first
    assert "1 of 2 runs are finished" in first
    second = compare_methods(status=0)
    assert "1 of 2 runs are there already" in second
    assert "gspo, seed 0" not in second  # it is not run again
    table = (tmp_path / "out/table.md").read_text()
    assert table.count("| gspo |") == 1
    assert "| ibpo |" in table
    kept = json.loads((tmp_path / "out/results.json").read_text())
    assert [run["steps"] for run in kept["runs"]] == [1, 1]
    assert kept["table"][1]["gradient"].keys() >= {"gradient_variance", "gspo_gradient_variance"}
    assert all(run["spent"]["flops"] > 0 for run in kept["runs"])
