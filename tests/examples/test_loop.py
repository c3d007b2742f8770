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

from megatron_ibpo.report import load_outcomes, outcomes_path
from support import example_runs as runs
from support.example_runs import ONE_TRAINER, SMALL, rows_of, start_script, wait_for_step
from support.paths import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.ray]


def output_of(process, status=0, timeout=200):
    found, output = runs.finished(process, timeout)
    assert found == status, output[-5000:]
    return output


@contextlib.contextmanager
def leaving_nothing(process):
    """What a process has started by now is gone afterwards, and the shared memory that it uses now."""
    started, shared = runs.started_by(process), set()
    assert runs.engines_among(started)
    for one in started:
        with contextlib.suppress(psutil.Error, OSError):
            used = Path(f"/proc/{one.pid}/maps").read_text().split()
            used += [file.path for file in one.open_files()]
            shared |= {word for word in used if word.startswith("/dev/shm/")}
    yield
    assert runs.still_running(started) == []
    assert [path for path in shared if Path(path).exists()] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One short run, and its output. Runs of test_family_loops.py have two trainers, and its engines are
    compared with fresh ones; tests/chaos.sh resumes runs."""
    run_dir = tmp_path_factory.mktemp("loop") / "run"
    keep = ("--save-debug-rollout-data", "--reward-workers", "1", "--operator-skill-prompts", "4")
    process = start_script(run_dir, *SMALL, *ONE_TRAINER, *keep)
    wait_for_step(run_dir, 1, process)
    with leaving_nothing(process):
        output = output_of(process)
    assert "trainers 0, engines " in output
    return run_dir, output


def test_a_run_leaves_the_promised_files(run):
    run_dir, output = run
    summary = json.loads((run_dir / "summary.json").read_text())
    told = ("accuracy_start", "accuracy_end", "greedy_start", "greedy_end")
    assert all(0 <= summary[name] <= 1 for name in told)
    assert 0 <= summary["reward_end"] <= 1
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["seconds_total"] > sum(summary["seconds_by_stage"].values()) * 0.9
    assert {"sample", "train", "sync", "evaluate", "save"} <= summary["seconds_by_stage"].keys()
    files = "curves.png config.yaml versions.json hf/config.json checkpoints/step_000003 tokenizer"
    assert [name for name in files.split() if not (run_dir / name).exists()] == []
    record = (run_dir / "rollouts/step_000001.json").read_text()
    assert re.search(r'"decoded": "[-0-9+=]+#-?\d+', record)
    skill = json.loads((run_dir / "operator_skill.json").read_text())
    assert (skill["prompts"], skill["responses"]) == (4, 4 * 4)
    assert output.index(skill["premise"]) < output.index("step 1/3"), "said before the first step"
    assert [row["seconds"].get("operator skill", 0) > 0 for row in rows_of(run_dir)] == [True, False, False]
    for evaluation in rows_of(run_dir, "evaluation"):
        solved = load_outcomes(outcomes_path(run_dir, evaluation["step"]))
        assert (len(solved), sum(solved.values()) / 8) == (8, evaluation["accuracy"])


def test_every_step_records_its_metrics_and_the_cost_so_far(run):
    rows = rows_of(run[0])
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() >= {"accuracy", "correction_success", "rewrite_rate"}
        assert row["updates_skipped"] == 0
        # the engines got their shards, and nothing twice; messages are padded between precisions
        assert row["weight_update_bytes_ratio"] == pytest.approx(1, abs=1e-4)
    # bf16 rollouts against the fp32 trainer, with no alarm; which steps train depends on last bits
    trained = [row for row in rows if row["sequences_trained"]]
    assert trained
    for row in trained:
        assert row.keys() >= {"clip_fraction", "entropy"}, row["step"]
        assert 0 < row["logprob_diff_abs_mean"] < 0.02 < row["logprob_diff_bound"] == 0.03, row["step"]
    tokens = [row["tokens_responses"] + row["tokens_corrections"] + row["tokens_trained"] for row in rows]
    assert rows[-1]["spent_tokens"] > sum(tokens)
    start, end = rows_of(run[0], "evaluation")
    assert (start["spent_tokens"], end["spent_tokens"]) == (0, rows[-1]["spent_tokens"])
    counted = sum(rows[1]["seconds"][stage] for stage in ("sample", "credit", "train", "sync"))
    grown = rows[1]["spent_accelerator_seconds"] - rows[0]["spent_accelerator_seconds"]
    assert grown == pytest.approx(counted, rel=1e-3)


def start_evaluation(*words):
    command = [sys.executable, "-m", "megatron_ibpo.commands.main", "evaluate", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_evaluating_a_runs_policy_repeats_its_last_evaluation(run, tmp_path):
    run_dir, _ = run
    output = output_of(start_evaluation(run_dir, "--run-dir", tmp_path / "alone"))
    at_the_end = rows_of(run_dir, "evaluation")[-1]
    results = json.loads((tmp_path / "alone/results.json").read_text())
    (of_set,) = results["sets"].values()
    measured = of_set["measures"]
    names = ("num_prompts", "accuracy", "accuracy_low", "accuracy_high", "greedy_accuracy", "mean_length")
    assert [measured[name] for name in names] == [at_the_end[name] for name in names]
    solved = dict(zip(map(int, of_set["problems"]["id"]), of_set["problems"]["accuracy"], strict=True))
    assert solved == load_outcomes(outcomes_path(run_dir, 3))
    assert (results["status"], results["policy"]) == ("finished", str(run_dir / "hf"))
    assert f"accuracy {measured['accuracy']:.3f} [" in output
    assert "trainers –, engines 0, 1 verifier" in output


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_and_all_that_it_started(run, tmp_path):
    process = start_evaluation(run[0], "--run-dir", tmp_path / "alone", "--eval-num-prompts", "20000")
    while "trainers –" not in (line := process.stdout.readline()):
        assert line, "it ended before it began"
    with leaving_nothing(process):
        os.killpg(process.pid, signal.SIGINT)
        assert "Traceback" not in output_of(process, 130, timeout=60)
    assert json.loads((tmp_path / "alone/results.json").read_text())["status"] == "unfinished"


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(tmp_path):
    """Each has a Ray, ports and temporary files of its own, and comes to what it comes to alone. In float32,
    where batches of other sizes leave the sampled tokens what they are; the hybrid model has none on CPUs."""
    flags = [*SMALL, "--num-rollout", "2", "--eval-num-prompts", "0", "--vllm-dtype", "float32", "--no-save"]

    def start(name, seed):
        return start_script(tmp_path / name, *flags, "--seed", str(seed), script="run.sh")

    for process in (start("first", 1), start("second", 2)):
        output_of(process)
    output_of(start("alone", 1))
    first, second, alone = (rows_of(tmp_path / name) for name in ("first", "second", "alone"))
    assert len(first) == len(second) == len(alone) == 2
    for found, expected in zip(first, alone, strict=True):
        for name in ("reward", "accuracy", "tokens_responses", "tokens_corrections", "tokens_trained"):
            assert found[name] == expected[name], name
        for name in ("loss", "grad_norm", "entropy", "logprob_diff_abs_mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    assert [row["loss"] for row in first] != [row["loss"] for row in second]
