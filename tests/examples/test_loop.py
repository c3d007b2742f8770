"""The whole loop, through the door a user takes: the example script, a few steps long."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_ibpo.report import load_outcomes, outcomes_path
from support.example_runs import (
    ONE_TRAINER,
    SMALL,
    engines_among,
    finished,
    rows_of,
    start_script,
    started_by,
    still_running,
    wait_for_step,
)
from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.ray]


def shared_memory(processes):
    """Segments that they have mapped or open now."""
    names = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            used = Path(f"/proc/{process.pid}/maps").read_text().split()
            used += [file.path for file in process.open_files()]
            names |= {word for word in used if word.startswith("/dev/shm/")}
    return names


def still_there(paths):
    return [path for path in paths if Path(path).exists()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One short run, and what it printed. Whole runs that check their weight updates are slow; test_engine.py
    compares an engine after an update with a fresh one."""
    run_dir = tmp_path_factory.mktemp("loop") / "run"
    process = start_script(
        run_dir,
        *(*SMALL, "--save-debug-rollout-data", "--save-interval", "1"),
        *("--keep-checkpoints", "3", "--reward-workers", "1"),
    )
    wait_for_step(run_dir, 1, process)
    started = started_by(process)
    shared = shared_memory(started)
    assert engines_among(started)
    status, output = finished(process)
    assert status == 0, output[-5000:]
    assert still_running(started) == []
    assert still_there(shared) == []
    return run_dir, output


def test_a_run_leaves_what_was_promised(run):
    run_dir, output = run
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("accuracy_start", "accuracy_end", "greedy_start", "greedy_end"):
        assert 0 <= summary[name] <= 1, name
    assert summary["reward_end"] is None, "three steps have no start and end apart"
    assert (run_dir / "tokenizer/tokenizer.json").exists()
    assert summary["status"] == "finished"
    assert summary["steps"] == 3
    assert summary["seconds_total"] > sum(summary["seconds_by_stage"].values()) * 0.9
    assert {"sample", "train", "sync", "evaluate", "save"} <= summary["seconds_by_stage"].keys()
    for name in ("curves.png", "config.yaml", "versions.json", "hf/config.json", "checkpoints/step_000003"):
        assert (run_dir / name).exists(), name
    for word in ("prompts per step", "step 3/3", "summary.json"):
        assert word in output, word


def test_every_step_tells_what_happened(run):
    rows = rows_of(run[0])
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {
            "reward", "accuracy", "correction_success", "rewrite_rate", "degenerate_groups", "skipped_pairs",
            "clip_fraction", "grad_norm", "logprob_diff_abs_mean", "tokens_trained", "entropy",
        } <= row.keys()  # fmt: skip
        assert row["updates_skipped"] == 0
        # the engines got their shards, and nothing twice; messages are padded between precisions
        assert row["weight_update_bytes_ratio"] == pytest.approx(1, abs=1e-4)
        # bf16 rollouts against the fp32 trainer, with no alarm
        assert 0 < row["logprob_diff_abs_mean"] < 0.02 < row["logprob_diff_bound"] == 0.03


def test_every_row_tells_what_was_spent_until_then(run):
    rows = rows_of(run[0])
    for name in ("spent_accelerator_seconds", "spent_tokens", "spent_flops"):
        spent = [row[name] for row in rows]
        assert spent == sorted(set(spent))
    tokens = [row["tokens_responses"] + row["tokens_corrections"] + row["tokens_trained"] for row in rows]
    assert rows[-1]["spent_tokens"] > sum(tokens)
    start, end = rows_of(run[0], "evaluation")
    assert start["spent_tokens"] == 0
    assert end["spent_tokens"] == rows[-1]["spent_tokens"]
    counted = sum(rows[1]["seconds"][stage] for stage in ("sample", "credit", "train", "sync"))
    grown = rows[1]["spent_accelerator_seconds"] - rows[0]["spent_accelerator_seconds"]
    assert grown == pytest.approx(2 * counted, rel=1e-3)  # two processes


def test_a_run_keeps_which_held_out_problems_were_solved(run):
    for evaluation in rows_of(run[0], "evaluation"):
        solved = load_outcomes(outcomes_path(run[0], evaluation["step"]))
        assert len(solved) == 8
        assert sum(solved.values()) / 8 == evaluation["accuracy"]


def test_a_run_says_before_its_first_step_whether_corrections_know_more_than_another_try(run):
    run_dir, output = run
    skill = json.loads((run_dir / "operator_skill.json").read_text())
    assert skill["prompts"] == 16
    assert skill["responses"] == 16 * 4
    assert output.index(skill["premise"]) < output.index("step 1/3")
    assert [row["seconds"].get("operator skill", 0) > 0 for row in rows_of(run_dir)] == [True, False, False]


@pytest.mark.slow
def test_a_budget_stops_a_run_after_the_step_that_spends_it(run, tmp_path):
    """It runs on recorded rollouts, where training alone is paid."""
    run_dir, _ = run
    per_step = [row["tokens_trained"] for row in rows_of(run_dir)]
    flags = ["--load-debug-rollout-data", str(run_dir / "rollouts"), "--no-save"]
    flags += ["--budget", str(per_step[0] + 1), "--budget-unit", "tokens", "--gradient-meter-interval", "1"]
    status, output = finished(start_script(tmp_path / "run", *SMALL, *flags))
    assert status == 0, output[-5000:]
    spent = [row["spent_tokens"] for row in rows_of(tmp_path / "run")]
    assert spent[-1] > per_step[0]
    assert all(value <= per_step[0] for value in spent[:-1])
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_the_divergence_from_the_reference_is_0_until_the_policy_moves(run, tmp_path):
    """It runs on recorded rollouts, with one update per step; the reference is what the policy starts
    from."""
    flags = ["--load-debug-rollout-data", str(run[0] / "rollouts"), "--no-save", "--num-rollout", "2"]
    flags += ["--ref-load", str(ROOT / "examples/tiny_qwen3_next_mends"), "--kl-coef", "0.1"]
    status, output = finished(start_script(tmp_path / "run", *SMALL, *flags, "--num-steps-per-rollout", "1"))
    assert status == 0, output[-5000:]
    first, second = (row["kl"] for row in rows_of(tmp_path / "run"))
    assert first == pytest.approx(0, abs=1e-10)
    assert second > 1e-6


def test_the_recorded_rollouts_are_readable(run):
    record = (run[0] / "rollouts/step_000001.json").read_text()
    assert re.search(r'"decoded": "[-0-9+=]+#-?\d+', record)
    assert "Candidate solution 1: " in record


@pytest.mark.slow  # the kills of .ci/run do it as well (tests/chaos.sh)
def test_a_resumed_run_ends_bit_for_bit_where_the_uninterrupted_one_did(run, tmp_path):
    """It resumes from the checkpoint of step 1, given the recorded rollouts; no engine is needed. The
    gradient meter, on in one of the two, changes nothing."""
    run_dir, _ = run
    resumed = tmp_path / "resumed"
    flags = ["--load", str(run_dir / "checkpoints/step_000001"), "--gradient-meter-interval", "1"]
    flags += ["--load-debug-rollout-data", str(run_dir / "rollouts")]
    status, output = finished(start_script(resumed, *SMALL, *flags))
    assert status == 0, output[-5000:]
    assert [row["step"] for row in rows_of(resumed)] == [2, 3]
    assert all({"gradient_variance", "gspo_gradient_variance"} <= row.keys() for row in rows_of(resumed))
    assert not any("gradient_variance" in row for row in rows_of(run_dir))
    first = load_file(run_dir / "hf/model.safetensors")
    second = load_file(resumed / "hf/model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = load_file(ROOT / "examples/tiny_qwen3_next_mends/model.safetensors")
    assert any(not torch.equal(start[name], first[name]) for name in start)


@pytest.mark.slow
def test_a_policy_that_diverges_is_stopped(run, tmp_path):
    """A learning rate that makes every later loss infinite: the steps are skipped, counted, then it stops."""
    run_dir, _ = run
    flags = ["--load-debug-rollout-data", str(run_dir / "rollouts"), "--lr", "1e30", "--no-save"]
    status, output = finished(start_script(tmp_path / "run", *SMALL, *flags, "--max-nonfinite-steps", "2"))
    assert status == 1, output[-5000:]
    assert "2 steps in a row had a loss or gradient that is not finite" in output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"].startswith("failed: NotFiniteError")


@pytest.mark.slow  # the kills of .ci/run stop runs too (tests/chaos.sh)
def test_ctrl_c_saves_and_leaves_nothing_running(tmp_path):
    """Two trainers are stopped in test_stopping.py."""
    run_dir = tmp_path / "run"
    at_once = ["--eval-num-prompts", "0", "--operator-skill-prompts", "0"]
    process = start_script(run_dir, *SMALL, *ONE_TRAINER, "--num-rollout", "500", *at_once)
    wait_for_step(run_dir, 1, process)
    started = started_by(process)
    shared = shared_memory(started)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    status, output = finished(process, 60)
    assert status == 130, output[-5000:]
    taken = rows_of(run_dir)[-1]["step"]
    assert (run_dir / f"checkpoints/step_{taken:06d}").is_dir()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert f"To resume after step {taken} " in output
    assert f"--load {run_dir}" in output
    assert still_running(started) == []
    assert still_there(shared) == []


@pytest.mark.slow
def test_an_engine_that_dies_is_restarted_once(tmp_path):
    run_dir = tmp_path / "run"
    process = start_script(run_dir, *SMALL, "--num-rollout", "6", "--eval-num-prompts", "0", "--no-save")
    wait_for_step(run_dir, 1, process)
    engines_among(started_by(process))[0].kill()
    status, output = finished(process)
    assert status == 0, output[-5000:]
    counts = json.loads((run_dir / "summary.json").read_text())["counts"]
    assert (counts["engine_deaths"], counts["engine_restarts"]) == (1, 1)
    assert re.search(r"engine \d died; \d+ requests? sent to other engines: ", output)
    assert rows_of(run_dir)[-1]["step"] == 6


def start_evaluation(*words):
    command = [sys.executable, "-m", "megatron_ibpo.commands.main", "evaluate", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_policy_of_a_run_is_evaluated_alone_as_it_was_at_its_end(run, tmp_path):
    """The same weights, prompts and seeds: every measure and every outcome."""
    run_dir, _ = run
    alone = tmp_path / "alone"
    process = start_evaluation(run_dir, "--run-dir", alone)
    status, output = finished(process)
    assert status == 0, output[-5000:]
    at_the_end = rows_of(run_dir, "evaluation")[-1]
    results = json.loads((alone / "results.json").read_text())
    (of_set,) = results["sets"].values()
    measured = of_set["measures"]
    names = ("num_prompts", "accuracy", "accuracy_low", "accuracy_high", "greedy_accuracy", "mean_length")
    assert [measured[name] for name in names] == [at_the_end[name] for name in names]
    solved = dict(zip(map(int, of_set["problems"]["id"]), of_set["problems"]["accuracy"], strict=True))
    assert solved == load_outcomes(outcomes_path(run_dir, 3))
    assert (results["status"], results["policy"]) == ("finished", str(run_dir / "hf"))
    assert f"accuracy {measured['accuracy']:.3f} [" in output
    assert "trainers –, engines 0-1, 1 verifier" in output


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_and_all_that_it_started(run, tmp_path):
    process = start_evaluation(run[0], "--run-dir", tmp_path / "alone", "--eval-num-prompts", "20000")
    while "trainers –" not in (line := process.stdout.readline()):
        assert line, "it ended before it began"
    started = started_by(process)
    shared = shared_memory(started)
    assert engines_among(started)
    os.killpg(process.pid, signal.SIGINT)
    status, output = finished(process, 60)
    assert status == 130, output[-5000:]
    assert "Traceback" not in output
    assert json.loads((tmp_path / "alone/results.json").read_text())["status"] == "unfinished"
    assert still_running(started) == []
    assert still_there(shared) == []


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(tmp_path):
    """Each has a Ray, ports and temporary files of its own, and comes to what it comes to alone. In float32,
    where batches of other sizes leave the sampled tokens what they are; the hybrid model has none on CPUs."""
    flags = [*SMALL, "--num-rollout", "2", "--eval-num-prompts", "0", "--vllm-dtype", "float32", "--no-save"]

    def start(name, seed):
        return start_script(tmp_path / name, *flags, "--seed", str(seed), script="run.sh")

    pair = [start("first", 1), start("second", 2)]
    try:
        ended = [finished(process) for process in pair]
    finally:
        for process in pair:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    ended.append(finished(start("alone", 1)))
    for status, output in ended:
        assert status == 0, output[-5000:]
    first, second, alone = (rows_of(tmp_path / name) for name in ("first", "second", "alone"))
    assert len(first) == len(second) == len(alone) == 2
    for found, expected in zip(first, alone, strict=True):
        for name in ("reward", "accuracy", "tokens_responses", "tokens_corrections", "tokens_trained"):
            assert found[name] == expected[name], name
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_abs_mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    assert [row["loss"] for row in first] != [row["loss"] for row in second]
