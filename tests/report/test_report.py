import errno
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ibpo.basics.entry_point import guarded
from megatron_ibpo.basics.records import Correction, Group, Prompt, token_ids
from megatron_ibpo.basics.reward_value import LARGEST_REWARD
from megatron_ibpo.basics.sampling_mask import sampling_mask
from megatron_ibpo.basics.user_files import append_record, append_whole, open_records, record_lines
from megatron_ibpo.config import ConfigError, EvalSampling
from megatron_ibpo.credit.explanation import GroupExplanation, Line, SampleExplanation
from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.engines.registry import on_device
from megatron_ibpo.evaluate import EvalSet, Evaluation, SetEvaluation
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report import Report, Size, Stages, load_step, prepare_run_dir, rollout_path, save_groups
from megatron_ibpo.report import rollout_data as recordings
from megatron_ibpo.report.alarms import check_reward_errors, rounding_bound, run_alarms, step_alarms
from megatron_ibpo.report.metrics_log import (
    Columns,
    MetricsLog,
    load_outcomes,
    outcomes_path,
    read_rows,
    save_outcomes,
)
from megatron_ibpo.report.run_dir import (
    DiskFullError,
    DiskWait,
    check_disk,
    locked,
    run_settings,
    run_tokenizer,
    write_whole,
)
from megatron_ibpo.report.run_report import count_lines
from megatron_ibpo.report.stages import StartLines
from megatron_ibpo.report.summary import COUNTS
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.weights.formats.run_state import checkpoint_bytes, export_bytes
from support.eval_samples import judged
from support.paths import ROOT
from support.run_pages import response, sequence

TINY = ROOT / "examples/tiny_qwen3"


def config_of(run_dir):
    return parse_config(["--hf-checkpoint", str(TINY), "--run-dir", str(run_dir), "--num-rollout", "4"])


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path / "runs" / "first")


def evaluated(sampled, greedy, problems=100, name="", samples=(), **several):
    """What an evaluation tells of a set; one without a name is the only set of a run."""
    interval = (sampled - 0.1, sampled + 0.1)
    number = 4 if several else 1
    found = Evaluation(problems, number, sampled, *interval, greedy, sampled, 12.0, 0.01, 0, **several)
    own = EvalSet(name or "sums", bool(name), [], EvalSampling(1, 48, 1.0, 1.0, -1), None)
    return SetEvaluation(own, found, list(samples))


def run(config, steps=range(1, 5), evaluations=(), *, status="finished", deaths=dict):
    """(summary, what the console showed) of a run that evaluates these sets after these steps."""
    prepare_run_dir(config)
    screen, before = io.StringIO(), steps.start - 1
    settings = {"console": Console(file=screen, width=100), "started": time.time(), "deaths": deaths}
    with Report(config, completed_steps=before, **settings) as report:
        report.sizes([Size("P", 16, "prompts a step")])
        for step in range(before, steps.stop):
            if step in steps:
                metrics = {"reward": step / 10, "correction_success": 0.5, "loss": -0.1, "skipped_pairs": 2}
                report.step(step, metrics, {"sample": 1.0, "train": 0.5})
            if step in evaluations:
                report.evaluation(step, evaluations[step], {"evaluate": 2.0}, {"spent_tokens": 100.0 * step})
        return report.finish(status=status, seconds={"save": 0.25}), screen.getvalue()


def rows_of(config):
    return [json.loads(line) for line in (config.run.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_runs_files_are_never_overwritten_and_continue_on_resuming(config):
    start_and_end, run_dir = {0: [evaluated(0.5, 0.4)], 4: [evaluated(0.75, 0.8)]}, config.run.run_dir
    summary, shown = run(config, evaluations=start_and_end)
    four_steps = [("evaluation", 0), *(("step", step) for step in range(1, 5)), ("evaluation", 4)]
    assert [(row["kind"], row["step"]) for row in rows_of(config)] == four_steps
    first_step = rows_of(config)[1]
    assert (first_step["reward"], first_step["seconds"]) == (0.1, {"sample": 1.0, "train": 0.5})

    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert 0 <= summary["seconds_total"] < 60
    assert summary == {
        "seconds_total": summary["seconds_total"], "status": "finished", "spent": {"spent_tokens": 400.0},
        "accuracy_start": 0.5, "accuracy_end": 0.75, "greedy_start": 0.4, "greedy_end": 0.8,
        "reward_start": pytest.approx(0.15), "reward_end": pytest.approx(0.35), "steps": 4,
        "seconds_by_stage": {"evaluate": 4.0, "sample": 4.0, "train": 2.0, "save": 0.25},
        "counts": dict.fromkeys(COUNTS, 0) | {"skipped_pairs": 8},
        "break_even": None, "prediction_error": None,
    }  # fmt: skip
    assert matplotlib.image.imread(run_dir / "curves.png").shape[1] > 900
    assert parse_config(["--config", str(run_dir / "config.yaml")]) == config
    assert run_settings(run_dir)["num-rollout"] == 4
    assert run_tokenizer(run_dir).encode("1+2") == load_tokenizer(TINY).encode("1+2")
    assert read_hf_config(run_dir / "tokenizer") == read_hf_config(TINY)
    assert not list(run_dir.rglob("*.safetensors"))
    assert "torch" in json.loads((run_dir / "versions.json").read_text())
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    assert rewards == [(step, pytest.approx(step / 10)) for step in range(1, 5)]
    assert [event.step for event in events.Scalars("evaluation/accuracy")] == [0, 4]
    assert [event.value for event in events.Scalars("seconds/sample")] == [1.0] * 4

    assert "step 3/4  reward 0.3  corrected 0.5  loss -0.1  1.5 s (sample 1.00, train 0.50)  eta 0:0" in shown
    assert "dropped: 8 wrong responses not corrected because the prompt would be too long" in shown
    assert "failed" not in shown, "a count of zero is no news at the end"

    with pytest.raises(ConfigError, match=f"already holds a run.*--load {run_dir}"):
        prepare_run_dir(config)
    # the rows of steps that are taken again are replaced, and one that a crash cut off is left out
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "step", "st')
    config.run.load = run_dir
    summary, _ = run(config, range(3, 5), start_and_end)
    assert [(row["kind"], row["step"]) for row in rows_of(config)] == four_steps
    assert (summary["accuracy_start"], summary["steps"]) == (0.5, 4), "known from before"


def table_row(shown, name):
    """The cells of the table at a run's end beside this name."""
    line = next(line for line in shown.splitlines() if line.strip().startswith(name))
    return [cell.strip() for cell in line.strip().split("│")[1:]]


def test_an_unmeasured_or_incomparable_end_is_a_dash(config, tmp_path):
    early = {0: [evaluated(0.5, 0.4)], 2: [evaluated(0.75, 0.8)]}
    summary, shown = run(config, evaluations=early, status="interrupted")
    assert (summary["accuracy_start"], summary["accuracy_end"]) == (0.5, None)
    assert table_row(shown, "accuracy, sampled") == ["0.500", "–"]
    assert table_row(shown, "training reward") == ["0.150", "0.350"], "the halves of four steps"
    assert "saved no checkpoint" in shown
    others = {0: [evaluated(0.5, 0.4, problems=2048)], 4: [evaluated(0.75, 0.8, problems=64)]}
    _, shown = run(config_of(tmp_path / "b"), evaluations=others)
    assert table_row(shown, "accuracy, greedy") == ["–", "0.800"]


def test_unmeasured_values_have_no_line_and_truncation_its_own(
    config,
):
    summary, shown = run(config, range(1, 2))
    assert (summary["reward_start"], summary["accuracy_start"]) == (None, None)
    assert "training reward" not in shown
    assert "accuracy, sampled" not in shown
    told = count_lines({"truncated_responses": 496, "degenerate_groups": 2, "engine_deaths": 1, "x": 0})
    assert told == [
        "cut off at the length limit: 496 responses",
        "taught nothing: 2 groups of responses with equal rewards",
        "failed: 1 engine deaths",
    ]


def test_a_start_shows_each_stage_and_its_seconds(capsys):
    starting = StartLines()
    starting("data")
    starting("trainers and engines")
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+\.\d", "N", line) for line in lines] == [
        "start, N s: data …", "start, N s: trainers and engines …",
    ]  # fmt: skip
    starting.end()
    last = r"started in \d+\.\d s: data \d+\.\d, trainers and engines \d+\.\d\n"
    assert re.fullmatch(last, capsys.readouterr().out)


def test_named_sets_have_metrics_curves_and_lines_of_their_own(config):
    def sets(first, second, best):
        several = {"pass_at": {2: first + 0.1, 4: second + 0.1}, "majority_accuracy": 0.55}
        own = evaluated(second, second, name="own", best_of_accuracy=best, **several)
        return [evaluated(first, first, name="aime25"), own]

    summary, shown = run(config, range(1, 11), {0: sets(0.25, 0.5, 0.45), 10: sets(0.375, 0.75, 0.65)})
    first = rows_of(config)[0]
    assert (first["eval/aime25/accuracy"], first["eval/own/greedy_accuracy"]) == (0.25, 0.5)
    assert (summary["aime25/accuracy_start"], summary["own/pass_at_4_end"]) == (0.25, 0.85)
    assert not {"accuracy", "accuracy_start"} & (first.keys() | summary.keys())
    for name, cells in {
        "aime25: accuracy, sampled": ["0.250", "0.375"],
        "own: accuracy, greedy": ["0.500", "0.750"],
        "own: pass@4": ["0.600", "0.850"],
        "own: maj@4": ["0.550", "0.550"],
        "own: best-of-4": ["0.450", "0.650"],
        "training reward": ["0.300", "0.800"],  # means of .1 to .5 and of .6 to 1
    }.items():
        assert table_row(shown, name) == cells


def test_a_run_that_stopped_early_says_how_to_go_on(config):
    run_dir = config.run.run_dir
    (run_dir / "checkpoints/step_000001").mkdir(parents=True)
    config.run.load = run_dir
    summary, shown = run(config, range(1, 2), status="failed: no luck")
    assert summary["accuracy_start"] is None
    *_, words, line = shown.splitlines()
    assert words.startswith("To resume after step 1 ")
    command = shlex.split(line)
    assert command[2:] == ["train", "--config", str(run_dir / "config.yaml"), "--load", str(run_dir)]
    assert Path(command[1]).is_file()
    resumed = parse_config(command[3:])
    assert (resumed.run.run_dir, resumed.run.load) == (run_dir, run_dir)


def test_deaths_are_counted_where_they_happen_and_over_resumed_runs(config):
    one_more = itertools.count(1)
    run(config, range(1, 3), deaths=lambda: {"engine_deaths": next(one_more)})
    assert [row["engine_deaths"] for row in rows_of(config)] == [1, 1]
    config.run.load = config.run.run_dir
    told = iter([{"engine_deaths": 2, "trainer_restarts": 0}, {"engine_deaths": 2, "trainer_restarts": 1}])
    counts = run(config, range(3, 4), deaths=lambda: next(told))[0]["counts"]
    assert counts["engine_deaths"] == 1 + 1 + 2
    assert counts["trainer_restarts"] == 1, "after the last row"
    assert counts["verifier_deaths"] == 0


def test_live_engines_sampling_ahead_and_a_death_are_shown(config):
    prepare_run_dir(config)
    ahead = {
        "engines": 4.0, "engines_alive": 3.0, "staleness_mean": 0.25, "staleness_max": 1.0,
        "samples_in_flight": 34.0, "groups_in_flight": 5.0, "groups_buffered": 1.0,
    }  # fmt: skip
    for terminal in (False, True):  # the latter shows them in a live panel
        screen = io.StringIO()
        with Report(config, console=Console(file=screen, width=120, force_terminal=terminal)) as report:
            logging.getLogger("megatron_ibpo.cluster.engines").warning("engine %d died", 3)
            logging.getLogger("another.library").warning("deprecated")
            report.step(1, {"reward": 0.1} | ahead, {"sample": 1.0})
        logging.getLogger("megatron_ibpo.cluster.engines").warning("engine 4 died")
        shown = screen.getvalue()
        assert re.search(r"^.*\d\d:\d\d:\d\d  engine 3 died$", shown, re.MULTILINE), terminal
        assert not re.search("deprecated|engine 4", shown), terminal
        assert (
            "engines 3/4  staleness 0.25, at most 1  in flight 34 samples of 5 groups  buffer 1" in shown
        ), terminal
        assert ("step 1 of 4" in shown) == terminal


def test_rows_reach_disk_at_once_and_trackers_the_same_numbers(config, monkeypatch):
    """Seconds are those of the run: its process may have set up an environment for minutes before."""
    prepare_run_dir(config)
    logged, started, before = [], {}, time.time()
    session = SimpleNamespace(
        log=lambda scalars, step: logged.append((scalars["reward"], scalars["seconds/sample"], step)),
        finish=lambda: logged.append("finished"),
    )

    def tracker_named(name):
        return SimpleNamespace(init=lambda **told: started.update({name: told}) or session)

    for name in ("wandb", "trackio"):
        setattr(config.run, f"use_{name}", True)
        monkeypatch.setitem(sys.modules, name, tracker_named(name))
    with Report(config, console=Console(file=io.StringIO())) as report:
        report.step(1, {"loss": math.nan, "reward": 0.5}, {"sample": 2.0})
        row = {"kind": "step", "step": 1, "loss": None, "reward": 0.5, "seconds": {"sample": 2.0}}
        assert rows_of(config) == [row]
        summary = report.finish()
    assert summary["seconds_total"] <= time.time() - before + 0.01
    assert logged == [(0.5, 2.0, 1)] * 2 + ["finished"] * 2
    assert started["wandb"].keys() - started["trackio"].keys() == {"dir"}, "trackio takes none"
    assert started["trackio"]["config"]["run"]["run_dir"] == str(config.run.run_dir)


def test_a_directory_with_samples_or_checkpoints_is_not_overwritten(tmp_path):
    for work in ("journal/000001.journal", "checkpoints/step_000001", "operator_skill.json"):
        config = config_of(tmp_path / work.partition("/")[0])
        prepare_run_dir(config)
        prepare_run_dir(config)
        (config.run.run_dir / work).parent.mkdir(exist_ok=True)
        (config.run.run_dir / work).touch()
        with pytest.raises(ConfigError, match="already holds a run"):
            prepare_run_dir(config)
    with pytest.raises(ConfigError, match=r"--run-dir: .* cannot be written"):
        prepare_run_dir(config_of(config.run.run_dir / work))  # a file


def test_a_full_disk_is_refused_unless_old_checkpoints_make_room(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    assert checkpoint_bytes(10**9, bf16=True) == 14 * 10**9, "2 weights + 4 master + 8 Adam bytes a parameter"
    config.run.run_dir.mkdir(parents=True, exist_ok=True)
    needed = checkpoint_bytes(10**9, bf16=True) + export_bytes(10**9, bf16=True)
    with pytest.raises(ConfigError, match=r"has 1.00 GiB free, .* need 14.96 GiB"):
        check_disk(config.run, needed)
    config.run.save = False
    check_disk(config.run, needed)
    config.run.save, config.run.load = True, config.run.run_dir
    for name in ("checkpoints/step_000010/shard", "hf_step_5/model.safetensors"):
        file = config.run.run_dir / name
        file.parent.mkdir(parents=True)
        with file.open("wb") as whole:
            whole.truncate(7 * 2**30)  # takes no room
    check_disk(config.run, 14 * 2**30 + 2**29)
    with pytest.raises(ConfigError, match=r"need 2.06 GiB more.*--keep-checkpoints"):
        check_disk(config.run, 16 * 2**30)


def test_inner_stages_are_not_counted_twice(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 10.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stages = Stages()
    with stages("credit"), stages("sample"):
        pass  # credit 0..10 holds sample 1..3
    with pytest.raises(ZeroDivisionError), stages("train"):
        _ = 1 / 0
    assert stages.take() == {"sample": 2.0, "credit": 8.0, "train": 4.0}
    assert stages.take() == {}


def exactly(value):
    """Tells 0.0 from -0.0 and a tuple from a list, which == does not all do; and what arrays hold."""
    with np.printoptions(floatmode="unique", threshold=sys.maxsize):
        return repr(value)


def recorded_group():
    nested = {"terms": (6, (7,)), "(tuple)": [-0.0, math.inf, None], 3: {"é": True}}
    prompt = Prompt(3, token_ids([5, 6]), 1, "42", "sums", "6*7?", nested)
    own = {
        "logprobs": np.array([-0.125, -0.3, -0.0], np.float32), "loss_mask": np.array([True, False, True]),
        "temperature": 5e-324, "versions": ((0, 3), (2, 4)), "reward_details": {"x": LARGEST_REWARD},
        "routed_experts": np.arange(12, dtype=np.uint16).reshape(3, 2, 2),
        "sampling_mask": sampling_mask([[52, 7, 200], [], [52]]), "drafts": (4, 2),
    }  # fmt: skip
    wrong = response("41", False, **own)
    right = response("42", True, index=1, reward=None, reward_error="timed out")
    corrected = Correction(0, (1,), response("42", True, prompt=(5, 1, 2, 6)), 0.5, 0.0, rewritten=True)
    return Group(prompt, [wrong, right], [corrected], 1)


def test_some_steps_are_recorded_with_their_first_groups(tmp_path, monkeypatch):
    def kept(num_steps, count):
        return [
            step for step in range(1, num_steps + 1) if recordings.is_recorded_step(step, num_steps, count)
        ]

    assert kept(60, 8) == [1, 9, 18, 26, 35, 43, 52, 60]
    assert kept(3, 8) == [1, 2, 3]
    assert (kept(1, 8), kept(60, 1), kept(60, 0)) == ([1], [1], [])
    monkeypatch.setattr(recordings, "TOKENS_PER_STEP", 5)  # a group has more
    group = recorded_group()
    trained = [sequence(n, "response", own.index, own, 1.0) for n in range(3) for own in group.responses]
    lines = [Line("φ", np.float32(0.5), "a + b = 0 + 0.5", "of it"), Line("reward", None)]
    told = GroupExplanation([SampleExplanation(lines), SampleExplanation()], [SampleExplanation()])
    recordings.keep_samples(tmp_path, 9, [group] * 3, lambda ids: "text", trained, [told] * 3)
    recorded = recordings.load_step(rollout_path(tmp_path / "samples", 9))
    step, groups, found = recorded.step, recorded.groups, recorded.trained
    assert step == 9
    # which take most of the room
    group.responses[0] = replace(group.responses[0], routed_experts=None, sampling_mask=None)
    assert exactly(groups) == exactly([group])
    assert found.keys() == {(0, "response", 0), (0, "response", 1)}
    assert recorded.explanations == [told]


def stored_groups(path):
    stored = load_step(path)
    return stored.step, stored.groups


def test_recordings_are_readable_and_a_bad_one_names_its_file(tmp_path):
    path, group = tmp_path / "step.json", recorded_group()
    save_groups(path, 1, [group], decode=lambda ids: f"{len(ids)} tokens")
    text = path.read_text()
    assert exactly(stored_groups(path)) == exactly((1, [group]))
    lines = [line.strip() for line in text.splitlines()]
    assert '"decoded": "3 tokens",' in lines, "the text of a response"
    assert '"prompt_decoded": "4 tokens",' in lines, "the text of a correction prompt"
    assert '"logprobs": [-0.125, -0.30000001192092896, -0.0],' in lines, "one line for each list"
    first = json.loads(text) | {"format": 1}  # its other differences are in the golden recordings
    (only,) = first["groups"]
    for sample in (*only["responses"], *(correction["response"] for correction in only["corrections"])):
        sample["policy_version"] = sample.pop("versions")[0][1]
    path.write_text(json.dumps(first))
    group.responses[0] = replace(group.responses[0], versions=((0, 3),))
    assert exactly(stored_groups(path)) == exactly((1, [group]))
    group.prompt.metadata["tokens"] = {1, 2}
    with pytest.raises(TypeError, match="metadata holds a set"):
        save_groups(path, 1, [group], decode=str)
    beyond = text.replace("[5, 6]", f"[{2**31}]"), text.replace('"reward": 1.0', '"reward": 1e308')
    assert text not in beyond
    for content in ("{", "[]", '{"format": 0}', '{"format": 1, "step": 1, "groups": [{}]}', *beyond, None):
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=f"recorded rollouts {path}"):
            load_step(path)


def test_outcomes_of_an_evaluation_come_back_problem_by_problem(tmp_path):
    path = outcomes_path(tmp_path, 60)
    rewards = [(4, 1.0), (4, 0.0), (4, None), (9, 1.0), (9, 1.0), (2, None)]
    samples = [judged(index, number, "3", reward) for number, (index, reward) in enumerate(rewards)]
    samples += [judged(4, 0, "3", 0.0, kind="greedy"), judged(4, 0, "3", 1.0, kind="correction")]
    save_outcomes(tmp_path, 60, [evaluated(0.5, 0.5, samples=samples)])
    assert path.name == "step_000060.json"
    assert json.loads(path.read_text())["problems"]["4"] == {"sampled": [1, 0, None], "greedy": [0]}
    loaded = load_outcomes(path)
    assert math.isnan(loaded.pop(2))
    assert loaded == {4: 0.5, 9: 1.0}
    path.write_text('{"problems": [1]}')
    for wrong in (path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=wrong.name):
            load_outcomes(wrong)


def alarms(groups_per_step=20, **metrics):
    """The alarms over steps 1, 2, … of these metrics."""
    rows = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    columns = Columns({"kind": "step", "step": n, **row} for n, row in enumerate(rows, 1))
    return run_alarms(columns, groups_per_step=groups_per_step)


def spell(alarm):
    return alarm.name, alarm.since, alarm.until


def test_the_default_run_raises_no_alarm():
    """Of examples/run_qwen3_next_ibpo.sh as it stands, 60 steps: the metrics that alarms look at."""
    recorded = Path(__file__).parent / "healthy_run.jsonl"
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert len(rows) == 60
    assert run_alarms(Columns(rows), groups_per_step=16) == []
    assert alarms(groups_per_step=None, degenerate_groups=[18.0] * 11) == []


def test_a_rule_over_ten_steps_names_its_metric_and_numbers():
    for metric, values, expected, words, without in [
        # the mean of ten falls by .1 a step: at step 19 it is .1, no less than a tenth; at step 20 it is 0
        ("entropy", [1.0] * 10 + [0.0] * 12, ("entropy collapse", 20, None),
         "0 nats per token over the last 10 steps, 0% of the 1 of the first 10", [1.0] * 10 + [0.11] * 40),
        # (5·100 + 5·300) / 10 = 200, (3·100 + 7·20) / 10 = 44
        ("response_length", [100.0] * 10 + [300.0] * 12, ("length drift", 15, None),
         "300 tokens per response over the last 10 steps, 3 times the 100", [100.0] * 10 + [199.0] * 30),
        ("response_length", [100.0] * 10 + [20.0] * 12, ("length drift", 17, None), "0.2 times the 100", []),
        # a mean above .01 needs a sum above .1 in ten steps: one step of .2 is enough while it is among them
        ("logprob_diff_k3", [0.0] * 14 + [0.2] + [0.0] * 15, ("trainer and engine differ", 15, 24),
         "0.02 nats per token apart (k3)", [0.01] * 30),
        ("accuracy", [0.99] * 12, ("reward saturates", 10, None), "easy", [0.97] * 12),
        ("accuracy", [0.01] * 12, ("reward saturates", 10, None), "hard", [0.03] * 12),
        # the tenth known value; and too few steps
        ("accuracy", [0.99, None] * 12, ("reward saturates", 19, None), "easy", [0.0] * 9),
        # or nobody looks for it
        ("reference_leakage_rate", [0.0] * 10 + [1.0] * 2 + [0.0] * 3, ("reference leakage", 12, None),
         "20.0% of the corrections", [None] * 12),
        ("degenerate_groups", [18.0] * 11, ("dead groups", 10, None), "90% of the groups", [17.0] * 11),
    ]:  # fmt: skip
        (alarm,) = alarms(**{metric: values})
        assert (spell(alarm), alarm.metric) == (expected, metric)
        assert words in alarm.reason
        assert alarms(**{metric: without}) == []


def resolved(*flags, on_gpu=False, model="tiny_qwen3"):
    return on_device(parse_config(flags), read_hf_config(ROOT / "examples" / model), on_gpu=on_gpu)


def test_differences_to_the_engine_beyond_rounding_raise_an_alarm():
    # mean |Δ log-prob| of three steps of examples/run_smollm2_ibpo.sh, trained in float32
    in_float32, in_bfloat16 = (1.1e-5, 1.2e-5, 1.3e-5), (0.042, 0.141, 0.146)
    for config, differences, advice in (
        (resolved(), in_float32, None),
        (resolved("--vllm-dtype", "bfloat16"), in_bfloat16, "--vllm-dtype float32"),
        # as examples/run_qwen3_next_ibpo.sh
        (resolved(model="tiny_qwen3_next"), (0.001, 0.002, 0.003), None),
        (resolved(), in_bfloat16, "--check-weight-update-equal"),  # such an engine has other weights
    ):
        bound = rounding_bound(config)
        measured = [{"logprob_diff_abs_mean": one, "logprob_diff_bound": bound} for one in differences]
        said = [step_alarms(row, responses=64) for row in measured]
        found = alarms(logprob_diff_abs_mean=differences, logprob_diff_bound=[bound] * 3)
        if advice is None:
            assert (said, found) == ([[]] * 3, []), (config, differences, advice)
            continue
        (alarm,) = found
        assert spell(alarm) == ("differs beyond rounding", 1, None), (config, differences, advice)
        assert said[-1] == [f"ALARM: {alarm.reason}"], (config, differences, advice)
        assert advice in alarm.reason
    assert rounding_bound(resolved("--bf16")) == rounding_bound(resolved(on_gpu=True)) == 0.03
    # what differs for other reasons has no bound
    for flags in (
        "--max-staleness 1", "--rollout-top-p 0.9", "--rollout-top-k-cycle -1 20",
        "--vllm-arg quantization=fp8_per_channel", "--old-logprobs engine --num-steps-per-rollout 2",
    ):  # fmt: skip
        config = resolved(*flags.split())
        assert rounding_bound(config) is None, flags
        truncated = "top" in flags  # the trainer then truncates alike, if the engine says how
        assert rounding_bound(config, replays_mask=True) == (0.001 if truncated else None), flags


def test_the_console_shows_failures_and_joins_spells_close_together():
    """Those that go on come first."""
    # 100 responses: 2,000 tokens, 20 each
    common = {"tokens_responses": [2000.0] * 3, "response_length": [20.0] * 3}
    found = alarms(reward_errors=[0.0, 5.0, 5.0], truncated_responses=[90.0, 89.0, 0.0], **common)
    assert [spell(alarm) for alarm in found] == [("verifier fails", 2, None), ("truncation", 1, 1)]
    rows = [{"reward_errors": 5, "truncated_responses": 89}, {"reward_errors": 0, "truncated_responses": 90}]
    for row, alarm in zip(rows, found, strict=True):
        assert step_alarms(row, responses=100) == [f"ALARM: {alarm.reason}"]
    errors = [100.0 if step in (1, 8, 30) else 0.0 for step in range(1, 41)]
    common = {"tokens_responses": [2000.0] * 40, "response_length": [20.0] * 40}
    found = alarms(reward_errors=errors, accuracy=[0.0] * 40, **common)
    assert [spell(alarm) for alarm in found] == [
        ("reward saturates", 10, None), ("verifier fails", 30, 30), ("verifier fails", 1, 8),
    ]  # fmt: skip


def test_a_failing_verifier_is_shown_and_stops_the_run():
    assert step_alarms({"reward_errors": 1, "truncated_responses": 0}, responses=128) == []
    broken = {"reward_errors": 16.0, "truncated_responses": 0.0}
    (said,) = step_alarms(broken, responses=16, first_reward_error="NameError: x")
    assert said == "ALARM: the verifier failed on 16 of 16 responses; the first error: NameError: x"
    check_reward_errors(8, 16, 0.5)
    check_reward_errors(0, 0, 0.0)
    with pytest.raises(RuntimeError, match=r"9 of 16 .* --max-reward-error-rate 0\.5 .*: KeyError"):
        check_reward_errors(9, 16, 0.5, first_reward_error="KeyError: 'a'")


class Disk:
    """One that has no room for the first `left` writes; `room` has a clock that only sleeping moves on."""

    def __init__(self, left, code=errno.ENOSPC):
        self.left, self.code, self.said, self.slept = left, code, [], []
        self.room = DiskWait(600, self.said.append, now=lambda: sum(self.slept), sleep=self.slept.append)

    def write(self):
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return "written"


def test_writers_share_a_deadline_that_restarts_once_there_is_room():
    disk = Disk(10**9)
    for _ in range(256):
        with pytest.raises(DiskFullError, match=r"the disk stayed full for 600 s .*No space left"):
            disk.room.write(disk.write)
    assert sum(disk.slept) == 600, "and not 43 hours"
    assert len(disk.said) == 1
    denied = Disk(1, errno.EACCES)
    with pytest.raises(PermissionError):
        denied.room.write(denied.write)
    assert denied.said == []
    large, small = Disk(10**9), Disk(0)

    def write():
        large.room.write(small.write)
        if sum(large.slept) % 10 == 0:  # now and then a small one is refused, too
            small.left = 1
        large.write()

    with pytest.raises(DiskFullError):
        large.room.write(write)
    assert sum(large.slept) <= 610
    disk = Disk(200)
    assert disk.room.write(disk.write) == "written"
    assert sum(disk.slept) == 400
    assert "(--disk-wait)" in disk.said[0]
    assert "space again after 400 s" in disk.said[1]
    disk.left, disk.code = 10**9, errno.EDQUOT
    with pytest.raises(DiskFullError):
        disk.room.write(disk.write)
    assert sum(disk.slept) == 400 + 600
    for disk.left in (0, 3):
        assert disk.room.write(disk.write) == "written", "the next deadline is a new one"


@contextmanager
def small_files():
    """Files, pytest's own report too, may have 4,096 bytes: what goes beyond fails after a part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_lines_and_files_are_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    with small_files(), path.open("ab", buffering=0) as file:
        append_whole(file, b"a" * 3000 + b"\n")
        with pytest.raises(OSError, match=r"too large: .*lines"):
            append_whole(file, b"b" * 3000 + b"\n")
        append_whole(file, b"c\n")
        assert path.read_bytes() == b"a" * 3000 + b"\nc\n"
        write_whole(tmp_path / "kept.json", "old")
        with pytest.raises(OSError, match="too large"):
            write_whole(tmp_path / "kept.json", "new" * 10000)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "run"]
        assert (tmp_path / "kept.json").read_text() == "old"
        shutil.rmtree(path.parent)  # the run was deleted meanwhile
        with pytest.raises(FileNotFoundError, match="run/lines"):
            append_whole(file, b"d\n")
    log = MetricsLog(tmp_path)
    with small_files(), pytest.raises(OSError, match="too large"):
        log.append("step", 1, {"x" * 5000: 0.5}, {})
    assert log.rows == []
    log.append("step", 1, {"reward": 0.5}, {})
    log.close()
    assert [row["reward"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0.5]


def test_an_unfinished_line_is_ignored_and_cut_off(tmp_path):
    path = tmp_path / "new" / "lines"
    with open_records(path) as file:
        append_record(file, {"a": 1})
        file.write(b'{"a": 2}')  # all but its end
    assert list(record_lines(path)) == [(f"{path}, line 1", b'{"a": 1}\n')]
    with open_records(path) as file:
        append_record(file, {"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_failing_tensorboard_is_reported_once_and_rows_continue(tmp_path, capfd, caplog):
    def work():
        log = MetricsLog(tmp_path)
        for step in (1, 2, 3):
            log.append("step", step, {"reward": 0.5}, {})
            shutil.rmtree(tmp_path / "tensorboard", ignore_errors=True)
        log.close()

    assert guarded(work) == 0
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("TensorBoard logging has stopped")
    assert capfd.readouterr().err == ""
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3


def hold(run_dir, held):
    with locked(run_dir):
        held.set()
        signal.pause()


def test_a_directory_has_one_run_whose_death_frees_it(tmp_path):
    run_dir, spawn = tmp_path / "new" / "run", multiprocessing.get_context("spawn")
    held = spawn.Event()
    holder = spawn.Process(target=hold, args=(run_dir, held), daemon=True)
    holder.start()
    assert held.wait(60)
    said = rf"{run_dir} is in use by process {holder.pid} on .*, since 2"
    with pytest.raises(ConfigError, match=said), locked(run_dir):
        pass
    assert f"process {holder.pid} on " in (run_dir / "run.lock").read_text(), "still that of the holder"
    holder.kill()
    holder.join(10)
    with locked(run_dir):
        assert f"process {os.getpid()} on " in (run_dir / "run.lock").read_text()
        with pytest.raises(ConfigError, match="in use"), locked(run_dir):
            pass
    with pytest.raises(ConfigError, match="written: Not a directory"), locked(run_dir / "run.lock/x"):
        pass
