"""A run shows its progress, and keeps its metrics, curves and summary."""

import io
import itertools
import json
import logging
import math
import re
import shlex
import shutil
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ibpo.basics.records import Correction, Group, Prompt, Sample, TrainSequence, token_ids
from megatron_ibpo.basics.reward_value import LARGEST_REWARD
from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import Config, ConfigError, EvalSampling
from megatron_ibpo.data import load_tokenizer
from megatron_ibpo.evaluate import EvalSet, Evaluation, SetEvaluation
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.report import (
    Report,
    RewardErrorRateError,
    Size,
    Stages,
    check_reward_errors,
    load_groups,
    prepare_run_dir,
    rollout_data,
    rollout_path,
    run_sizes,
    save_groups,
    step_alarms,
)
from megatron_ibpo.report.problem_outcomes import load_outcomes, outcomes_path, save_outcomes
from megatron_ibpo.report.rollout_data import is_kept, keep_samples, load_step
from megatron_ibpo.report.run_dir import run_settings, run_tokenizer
from megatron_ibpo.report.summary import COUNTS
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.weights.formats.retention import checkpoint_bytes, export_bytes
from support.eval_samples import judged
from support.paths import ROOT

SAMPLING = EvalSampling(1, 48, 1.0, 1.0, -1)


def config_of(run_dir: Path) -> Config:
    config = parse_config([])
    config.run.run_dir = run_dir
    config.run.num_rollout = 4
    return config


@pytest.fixture
def config(tmp_path) -> Config:
    return config_of(tmp_path / "runs" / "first")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Config, dict, str]:
    """A run of four steps: (configuration, summary, what the console showed)."""
    config = config_of(tmp_path_factory.mktemp("runs") / "first")
    prepare_run_dir(config)
    screen = io.StringIO()
    summary = run_steps(config, range(1, 5), screen)
    return config, summary, screen.getvalue()


def accuracy(sampled: float, greedy: float, *, problems: int = 100, **several) -> Evaluation:
    samples = 4 if several else 1
    interval = (sampled - 0.1, sampled + 0.1)
    return Evaluation(problems, samples, sampled, *interval, greedy, sampled, 12.0, 0.01, 0, **several)


def unnamed(evaluation: Evaluation, samples=()) -> list[SetEvaluation]:
    """The only set of a run, which the user gave no name."""
    return [SetEvaluation(EvalSet("sums", False, [], SAMPLING, None), evaluation, list(samples))]


def step_metrics(step: int) -> dict[str, float]:
    return {"reward": step / 10, "correction_success": 0.5, "loss": -0.1, "skipped_pairs": 2}


def run_steps(config: Config, steps: range, screen: io.StringIO, *, deaths=dict) -> dict:
    console = Console(file=screen, width=100)
    behind = steps.start - 1
    with Report(
        config, completed_steps=behind, console=console, started=time.time(), deaths=deaths
    ) as report:
        report.sizes([Size("P", 16, "prompts a step")])
        if steps.start == 1:
            report.evaluation(0, unnamed(accuracy(0.5, 0.4)), {"evaluate": 2.0})
        for step in steps:
            report.step(step, step_metrics(step), {"sample": 1.0, "train": 0.5})
        later = unnamed(accuracy(0.75, 0.8))
        report.evaluation(steps.stop - 1, later, {"evaluate": 2.0}, {"spent_tokens": 400.0})
        return report.finish(seconds={"save": 0.25})


def rows_of(config: Config) -> list[dict]:
    return [json.loads(line) for line in (config.run.run_dir / "metrics.jsonl").read_text().splitlines()]


FOUR_STEPS = [("evaluation", 0), *(("step", step) for step in range(1, 5)), ("evaluation", 4)]


def test_a_run_leaves_metrics_summary_curves_configuration_and_versions(finished):
    config, summary, shown = finished
    run_dir = config.run.run_dir
    assert [(row["kind"], row["step"]) for row in rows_of(config)] == FOUR_STEPS
    first_step = rows_of(config)[1]
    assert first_step["reward"] == 0.1
    assert first_step["seconds"] == {"sample": 1.0, "train": 0.5}

    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert 0 <= summary["seconds_total"] < 60
    assert summary == {
        "seconds_total": summary["seconds_total"], "status": "finished", "spent": {"spent_tokens": 400.0},
        "accuracy_start": 0.5, "accuracy_end": 0.75, "greedy_start": 0.4, "greedy_end": 0.8,
        "reward_start": None, "reward_end": None, "steps": 4,
        "seconds_by_stage": {"evaluate": 4.0, "sample": 4.0, "train": 2.0, "save": 0.25},
        "counts": dict.fromkeys(COUNTS, 0) | {"skipped_pairs": 8},
        "break_even": None,
        "prediction_error": None,
    }  # fmt: skip
    height, width = matplotlib.image.imread(run_dir / "curves.png").shape[:2]
    assert height > 300
    assert width > 900
    assert parse_config(["--config", str(run_dir / "config.yaml")]) == config
    assert "torch" in json.loads((run_dir / "versions.json").read_text())

    assert "prompts a step" in shown
    assert "step 3/4  reward 0.3  corrected 0.5  loss -0.1  1.5 s (sample 1.00, train 0.50)  eta 0:0" in shown
    assert "accuracy 0.500" in shown
    assert str(run_dir / "summary.json") in shown
    assert "not corrected because the prompt would be too long" in shown
    assert "reward errors" not in shown, "a count of zero is no news at the end"


def shown_at_the_end(config, *evaluations, status="finished", steps=4) -> tuple[dict, str]:
    """Summary and closing words of a run with these (step, evaluation)."""
    prepare_run_dir(config)
    screen = io.StringIO()
    with Report(config, console=Console(file=screen, width=100), started=time.time()) as report:
        for step in range(steps + 1):
            if step:
                report.step(step, step_metrics(step), {})
            for at, evaluation in evaluations:
                if at == step:
                    report.evaluation(at, unnamed(evaluation), {})
        summary = report.finish(status=status)
    return summary, screen.getvalue().rpartition(f"{status}: {steps} step")[2]


def table_row(shown: str, name: str) -> list[str]:
    line = next(line for line in shown.splitlines() if line.strip().startswith(name))
    return [cell.strip() for cell in line.strip().split("│")[1:]]


def test_an_end_that_was_not_measured_is_a_dash(config):
    early = [(0, accuracy(0.5, 0.4)), (2, accuracy(0.75, 0.8))]
    summary, shown = shown_at_the_end(config, *early, status="interrupted")
    assert (summary["accuracy_start"], summary["accuracy_end"]) == (0.5, None)
    assert table_row(shown, "accuracy, sampled") == ["0.500", "–"]
    assert table_row(shown, "training reward") == ["–", "–"], "the first and last five of four steps overlap"
    assert "saved no checkpoint" in shown


def test_evaluations_on_different_problems_are_not_compared(config):
    both = [(0, accuracy(0.5, 0.4, problems=2048)), (4, accuracy(0.75, 0.8, problems=64))]
    _, shown = shown_at_the_end(config, *both)
    assert table_row(shown, "accuracy, greedy") == ["–", "0.800"]


def test_the_console_ends_with_what_several_samples_told(config):
    several = {"pass_at": {2: 0.6, 4: 0.7}, "majority_accuracy": 0.55, "best_of_accuracy": 0.45}
    later = {"pass_at": {2: 0.8, 4: 0.9}, "majority_accuracy": 0.75, "best_of_accuracy": 0.65}
    both = [(0, accuracy(0.5, 0.4, **several)), (10, accuracy(0.75, 0.8, **later))]
    summary, shown = shown_at_the_end(config, *both, steps=10)
    assert summary["pass_at_4_end"] == 0.9
    assert table_row(shown, "pass@2") == ["0.600", "0.800"]
    assert table_row(shown, "pass@4") == ["0.700", "0.900"]
    assert table_row(shown, "maj@4") == ["0.550", "0.750"]
    assert table_row(shown, "best-of-4") == ["0.450", "0.650"]
    assert table_row(shown, "training reward") == ["0.300", "0.800"], "means of .1 to .5 and of .6 to 1"


def test_sets_with_names_have_metrics_curves_and_lines_of_their_own(config):
    def named(**accuracies):
        return [
            SetEvaluation(EvalSet(name, True, [], SAMPLING, None), accuracy(value, value), [])
            for name, value in accuracies.items()
        ]

    prepare_run_dir(config)
    screen = io.StringIO()
    with Report(config, console=Console(file=screen, width=100), started=time.time()) as report:
        report.evaluation(0, named(aime25=0.25, own=0.5), {})
        for step in range(1, 5):
            report.step(step, step_metrics(step), {})
        report.evaluation(4, named(aime25=0.375, own=0.75), {})
        summary = report.finish()
    first = rows_of(config)[0]
    assert (first["eval/aime25/accuracy"], first["eval/own/greedy_accuracy"]) == (0.25, 0.5)
    assert "accuracy" not in first
    assert (summary["aime25/accuracy_start"], summary["aime25/accuracy_end"]) == (0.25, 0.375)
    assert "accuracy_start" not in summary
    shown = screen.getvalue()
    assert "evaluation after 4 steps, own: accuracy 0.750" in shown
    assert table_row(shown, "aime25: accuracy, sampled") == ["0.250", "0.375"]
    assert table_row(shown, "own: accuracy, greedy") == ["0.500", "0.750"]
    assert (config.run.run_dir / "curves.png").exists()


def test_a_run_that_stopped_early_says_how_to_go_on(config):
    (config.run.run_dir / "checkpoints/step_000001").mkdir(parents=True)
    config.run.load = config.run.run_dir
    summary, shown = shown_at_the_end(config, status="failed: no luck", steps=1)
    assert summary["accuracy_start"] is None
    command = shlex.split(shown.splitlines()[-1])
    assert shown.splitlines()[-2].startswith("To resume after step 1 ")
    run_dir = config.run.run_dir
    assert command[2:] == ["train", "--config", str(run_dir / "config.yaml"), "--load", str(run_dir)]
    assert Path(command[1]).is_file()
    resumed = parse_config(command[3:])
    assert (resumed.run.run_dir, resumed.run.load) == (run_dir, run_dir)


def test_a_run_keeps_the_tokenizer_and_settings_that_made_it(config):
    config.model.hf_checkpoint = ROOT / "examples/tiny_qwen3"
    run_dir = prepare_run_dir(config)
    assert run_tokenizer(run_dir).encode("1+2") == load_tokenizer(config.model.hf_checkpoint).encode("1+2")
    assert run_settings(run_dir)["num-rollout"] == 4
    assert not list(run_dir.rglob("*.safetensors"))
    assert read_hf_config(run_dir / "tokenizer") == read_hf_config(config.model.hf_checkpoint)
    with pytest.raises(ValueError, match="is it the directory of a run"):
        run_settings(run_dir.parent)


def test_what_goes_wrong_in_a_whole_step_is_said_at_once():
    fine = {"reward_errors": 0.0, "truncated_responses": 3.0}
    assert step_alarms(fine, responses=16) == []
    assert step_alarms({"reward_errors": 1, "truncated_responses": 0}, responses=128) == []
    broken = {"reward_errors": 16.0, "truncated_responses": 16.0}
    verifier, length = step_alarms(broken, responses=16, first_reward_error="NameError: x")
    assert verifier == "ALARM: the verifier failed on 16 of 16 responses; the first error: NameError: x"
    assert "16 of 16 responses were cut off" in length
    assert "--rollout-max-response-len" in length


def test_a_verifier_that_fails_too_often_stops_the_run():
    check_reward_errors(8, 16, 0.5)
    check_reward_errors(0, 0, 0.0)
    with pytest.raises(RewardErrorRateError, match=r"9 of 16 .* --max-reward-error-rate 0\.5 .*: KeyError"):
        check_reward_errors(9, 16, 0.5, first_reward_error="KeyError: 'a'")


def test_counts_of_one_are_singular():
    assert [counted(n, "rank") for n in (0, 1, 2, 2048)] == ["0 ranks", "1 rank", "2 ranks", "2,048 ranks"]
    layout = next(size for size in run_sizes(Config(), 1) if size.name == "layout")
    assert layout.meaning == "of 1 rank"


def test_deaths_are_counted_where_they_happen_and_over_resumed_runs(config):
    prepare_run_dir(config)
    one_more = itertools.count(1)
    with Report(config, deaths=lambda: {"engine_deaths": next(one_more)}) as report:
        for step in (1, 2):
            report.step(step, {}, {})
    assert [row["engine_deaths"] for row in rows_of(config)] == [1, 1]

    config.run.load = config.run.run_dir
    told = iter([{"engine_deaths": 2, "trainer_restarts": 0}, {"engine_deaths": 2, "trainer_restarts": 1}])
    summary = run_steps(config, range(3, 4), io.StringIO(), deaths=lambda: next(told))
    counts = summary["counts"]
    assert counts["engine_deaths"] == 1 + 1 + 2
    assert counts["trainer_restarts"] == 1, "after the last row"
    assert counts["verifier_deaths"] == 0


def test_what_the_process_did_before_the_run_is_no_part_of_its_seconds(config):
    """A script that sets up an environment for minutes becomes the process of the run."""
    prepare_run_dir(config)
    before = time.time()
    with Report(config, console=Console(file=io.StringIO())) as report:
        summary = report.finish()
    assert summary["seconds_total"] <= time.time() - before + 0.01


def test_a_death_is_shown_at_once_with_the_time(config):
    prepare_run_dir(config)
    screen = io.StringIO()
    with Report(config, console=Console(file=screen, width=100)):
        logging.getLogger("megatron_ibpo.cluster.engines").warning("engine %d died", 3)
        logging.getLogger("another.library").warning("deprecated")
    logging.getLogger("megatron_ibpo.cluster.engines").warning("engine 4 died")
    assert re.fullmatch(r"\d\d:\d\d:\d\d  engine 3 died\n", screen.getvalue())


@pytest.mark.parametrize("terminal", [False, True])
def test_engines_alive_and_what_is_sampled_ahead_are_shown(config, terminal):
    """A terminal shows them in a live panel."""
    prepare_run_dir(config)
    ahead = {
        "engines": 4.0, "engines_alive": 3.0, "staleness_mean": 0.25, "staleness_max": 1.0,
        "samples_in_flight": 34.0, "groups_in_flight": 5.0, "groups_buffered": 1.0,
    }  # fmt: skip
    screen = io.StringIO()
    with Report(config, console=Console(file=screen, width=120, force_terminal=terminal)) as report:
        report.step(1, step_metrics(1) | ahead, {"sample": 1.0})
    shown = "engines 3/4  staleness 0.25, at most 1  in flight 34 samples of 5 groups  buffer 1 group"
    assert shown in screen.getvalue()
    assert "corrected" in screen.getvalue()
    assert ("step 1 of 4" in screen.getvalue()) == terminal


def test_tensorboard_holds_the_same_numbers(finished):
    events = EventAccumulator(str(finished[0].run.run_dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [
        (step, pytest.approx(step / 10)) for step in range(1, 5)
    ]
    assert [e.step for e in events.Scalars("evaluation/accuracy")] == [0, 4]
    assert [e.value for e in events.Scalars("seconds/sample")] == [1.0] * 4


def test_a_resumed_run_replaces_the_rows_of_steps_it_takes_again(finished, config):
    """It leaves out a row that a crash cut off."""
    run_dir = config.run.run_dir
    shutil.copytree(finished[0].run.run_dir, run_dir)
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "step", "st')
    config.run.load = run_dir
    prepare_run_dir(config)
    summary = run_steps(config, range(3, 5), io.StringIO())
    assert [(row["kind"], row["step"]) for row in rows_of(config)] == FOUR_STEPS
    assert summary["accuracy_start"] == 0.5, "known from before"
    assert summary["steps"] == 4


def test_rows_are_on_disk_as_soon_as_they_are_written_and_nan_is_null(config):
    prepare_run_dir(config)
    with Report(config, console=Console(file=io.StringIO())) as report:
        report.step(1, {"loss": math.nan, "reward": 0.5}, {})
        assert rows_of(config) == [{"kind": "step", "step": 1, "loss": None, "reward": 0.5, "seconds": {}}]


@pytest.mark.parametrize(("tracker", "own"), [("wandb", {"dir"}), ("trackio", set())])
def test_wandb_and_trackio_get_the_same_numbers(config, monkeypatch, tracker, own):
    prepare_run_dir(config)
    setattr(config.run, f"use_{tracker}", True)
    logged, started = [], {}
    session = SimpleNamespace(
        log=lambda scalars, step: logged.append((scalars, step)), finish=lambda: logged.append("finished")
    )
    fake = SimpleNamespace(init=lambda **keywords: started.update(keywords) or session)
    monkeypatch.setitem(sys.modules, tracker, fake)
    with Report(config, console=Console(file=io.StringIO())) as report:
        report.step(1, {"reward": 0.5}, {"sample": 2.0})
    assert logged == [({"reward": 0.5, "seconds/sample": 2.0}, 1), "finished"]
    assert started.keys() == {"project", "name", "config"} | own, "trackio takes no dir"
    assert started["config"]["run"]["run_dir"] == str(config.run.run_dir)


def test_another_run_in_the_directory_is_not_overwritten(finished):
    config = finished[0]
    with pytest.raises(ConfigError, match=f"already holds a run.*--load {config.run.run_dir}"):
        prepare_run_dir(config)


@pytest.mark.parametrize("work", ["journal/000001.journal", "checkpoints/step_000001", "operator_skill.json"])
def test_what_was_sampled_or_trained_is_not_overwritten_before_the_first_row_either(config, work):
    prepare_run_dir(config)
    prepare_run_dir(config)
    (config.run.run_dir / work).parent.mkdir(exist_ok=True)
    (config.run.run_dir / work).touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare_run_dir(config)


def test_an_unwritable_run_directory_is_refused(config):
    config.run.run_dir.parent.mkdir()
    config.run.run_dir.write_text("a file stands here")
    with pytest.raises(ConfigError, match=r"--run-dir: .* cannot be written"):
        prepare_run_dir(config)


def test_a_full_disk_is_refused_before_work_starts(config, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, 2**30))
    assert checkpoint_bytes(10**9, bf16=True) == 14 * 10**9, "2 weights + 4 master + 8 Adam bytes a parameter"
    needed = checkpoint_bytes(10**9, bf16=True) + export_bytes(10**9, bf16=True)
    with pytest.raises(ConfigError, match=r"has 1.00 GiB free, .* need 14.96 GiB"):
        prepare_run_dir(config, checkpoint_bytes=needed)
    config.run.save = False
    prepare_run_dir(config, checkpoint_bytes=needed)


def test_a_run_that_goes_on_writes_in_the_place_of_what_it_has_saved(config, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, 2**30))
    for name in ("checkpoints/step_000010/shard", "hf_step_5/model.safetensors"):
        file = config.run.run_dir / name
        file.parent.mkdir(parents=True)
        with file.open("wb") as whole:
            whole.truncate(7 * 2**30)  # takes no room
    config.run.load = config.run.run_dir
    prepare_run_dir(config, checkpoint_bytes=14 * 2**30 + 2**29)
    with pytest.raises(ConfigError, match=r"need 2.06 GiB more.*--keep-checkpoints"):
        prepare_run_dir(config, checkpoint_bytes=16 * 2**30)


def test_inner_stages_are_not_counted_twice(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 10.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stages = Stages()
    with stages("credit"), stages("sample"):
        pass  # credit 0..10 holds sample 1..3
    with pytest.raises(ZeroDivisionError), stages("train"):
        _ = 1 / 0
    stages.add("train", 1.0)
    assert stages.take() == {"sample": 2.0, "credit": 8.0, "train": 5.0}
    assert stages.take() == {}


floats = st.floats(allow_nan=False)
rewards = st.floats(-LARGEST_REWARD, LARGEST_REWARD)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(token_ids)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("(tuple)"), inner)
    ),
    max_leaves=8,
)


@st.composite
def samples(draw, index=0):
    token_ids = draw(ids)
    size = len(token_ids)
    logprobs = st.lists(st.floats(allow_nan=False, width=32), min_size=size, max_size=size)
    flags = st.lists(st.booleans(), min_size=size, max_size=size)
    return Sample(
        prompt_token_ids=draw(ids),
        token_ids=token_ids,
        logprobs=np.array(draw(logprobs), np.float32),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        temperature=draw(floats),
        versions=draw(st.sampled_from([((0, 0),), ((0, 3), (2, 4))])),
        loss_mask=np.array(draw(flags), bool),
        index=index,
        reward=draw(st.none() | rewards),
        correct=draw(st.booleans()),
        reward_error=draw(st.none() | st.text()),
        reward_details=draw(st.dictionaries(st.text(), rewards, max_size=2)),
        routed_experts=draw(st.sampled_from([None, np.arange(12, dtype=np.uint16).reshape(3, 2, 2)])),
    )


groups = st.builds(
    Group,
    prompt=st.builds(
        Prompt, index=st.integers(0), token_ids=ids, head_length=st.integers(0), label=st.text(),
        task=st.text(), text=st.text(),
        metadata=st.dictionaries(st.text(), values, max_size=3),
    ),
    responses=st.lists(samples(), max_size=3),
    corrections=st.lists(
        st.builds(
            Correction,
            target=st.integers(0),
            references=st.lists(st.integers(0)).map(tuple),
            response=samples(), distance=floats, reference_distance=st.none() | floats,
            rewritten=st.booleans(),
        ),
        max_size=2,
    ),
    skipped_pairs=st.integers(0),
)  # fmt: skip


def exactly(value) -> str:
    """Tells 0.0 from -0.0 and a tuple from a list, which == does not all do; and what arrays hold."""
    with np.printoptions(floatmode="unique", threshold=sys.maxsize):
        return repr(value)


@settings(max_examples=20, deadline=None)
@given(recorded=st.lists(groups, max_size=2))
def test_recorded_groups_come_back_identical(tmp_path_factory, recorded):
    path = rollout_path(tmp_path_factory.mktemp("rollouts"), 7)
    save_groups(path, 7, recorded, decode=lambda ids: "§" * len(ids))
    step, loaded = load_groups(path)
    assert step == 7
    assert exactly(loaded) == exactly(recorded)


def recorded_group() -> Group:
    prompt = Prompt(3, token_ids([5, 6]), 1, "42", "sums", "6*7?", {"terms": (6, 7)})

    def sample(content, reward, prompt_ids=(5, 6), logprobs=None):
        return Sample(
            prompt_token_ids=token_ids(prompt_ids),
            token_ids=token_ids(content),
            logprobs=np.array(logprobs or [-0.5] * len(content), np.float32),
            finish_reason="stop", temperature=1.0, versions=((0, 4),), loss_mask=np.ones(len(content), bool),
            reward=reward, correct=reward == 1,
        )  # fmt: skip

    wrong, right = sample([1, 2], 0.0, logprobs=[-0.125, -0.3]), sample([3], 1.0)
    right.index = 1
    corrected = Correction(0, (1,), sample([3], 1.0, prompt_ids=(5, 1, 2, 6)), 0.5, 0.0)
    return Group(prompt, [wrong, right], [corrected], 1)


FORMAT_1 = """{"format": 1, "step": 7, "groups": [{
"prompt": {"decoded": "", "index": 3, "token_ids": [5, 6], "head_length": 1, "label": "42", "task": "sums",
 "text": "6*7?", "metadata": {"terms": {"(tuple)": [6, 7]}}},
"responses": [
 {"decoded": "", "token_ids": [1, 2], "logprobs": [-0.125, -0.30000001192092896], "finish_reason": "stop",
  "temperature": 1.0, "policy_version": 4, "reward": 0.0, "correct": false, "reward_error": null,
  "prompt_token_ids": null},
 {"decoded": "", "token_ids": [3], "logprobs": [-0.5], "finish_reason": "stop", "temperature": 1.0,
  "policy_version": 4, "reward": 1.0, "correct": true, "reward_error": null, "prompt_token_ids": null}],
"corrections": [
 {"prompt_decoded": "", "target": 0, "references": [1], "prompt_token_ids": [5, 1, 2, 6],
  "response": {"decoded": "", "token_ids": [3], "logprobs": [-0.5], "finish_reason": "stop",
   "temperature": 1.0, "policy_version": 4, "reward": 1.0, "correct": true, "reward_error": null,
   "prompt_token_ids": null},
  "distance": 0.5, "reference_distance": 0.0, "beyond_threshold": false, "rewritten": false,
  "unmodified_share": 0.0}],
"skipped_pairs": 1}]}"""


def test_samples_of_the_first_the_last_and_some_steps_between_are_kept():
    def kept(num_steps: int, count: int) -> list[int]:
        return [step for step in range(1, num_steps + 1) if is_kept(step, num_steps, count)]

    assert kept(60, 8) == [1, 9, 18, 26, 35, 43, 52, 60]
    assert kept(3, 8) == [1, 2, 3]
    assert (kept(1, 8), kept(60, 1), kept(60, 0)) == ([1], [1], [])


def test_kept_samples_are_the_first_groups_of_a_step_and_what_was_trained_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_data, "TOKENS_PER_STEP", 5)  # a group has 13
    group = recorded_group()
    trained = [
        TrainSequence(
            response.prompt_token_ids, response.token_ids, response.loss_mask, advantage=1.0, weight=0.5,
            prompt_index=3, group=number, index=response.index,
        )
        for number in range(3)
        for response in group.responses
    ]  # fmt: skip
    keep_samples(tmp_path, 9, [group] * 3, lambda ids: "text", trained)
    step, groups, found = load_step(rollout_path(tmp_path / "samples", 9))
    assert step == 9
    assert exactly(groups) == exactly([group])
    assert found.keys() == {(0, "response", 0), (0, "response", 1)}


def test_recordings_of_the_first_format_are_read_as_ever(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(FORMAT_1)
    step, groups = load_groups(path)
    assert step == 7
    assert exactly(groups) == exactly([recorded_group()])


def test_recorded_rollouts_are_readable(tmp_path):
    path = tmp_path / "step.json"
    save_groups(path, 1, [recorded_group()], decode=lambda ids: " ".join(f"t{i}" for i in ids))
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert '"decoded": "t1 t2",' in lines, "the text of a response"
    assert '"prompt_decoded": "t5 t1 t2 t6",' in lines, "the text of a correction prompt"
    assert '"logprobs": [-0.125, -0.30000001192092896],' in lines, "one line for each list"


def test_what_cannot_be_recorded_is_refused(tmp_path):
    group = recorded_group()
    group.prompt.metadata["tokens"] = {1, 2}
    with pytest.raises(TypeError, match="metadata holds a set"):
        save_groups(tmp_path / "step.json", 1, [group], decode=str)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"format": 0}',
        '{"format": 1, "step": 1, "groups": [{}]}',
        FORMAT_1.replace("[3]", f"[{2**31}]"),
        FORMAT_1.replace('"reward": 1.0', '"reward": 1e308'),
    ],
)
def test_a_bad_recording_names_its_file(tmp_path, content):
    path = tmp_path / "step.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"recorded rollouts {path}"):
        load_groups(path)


def test_outcomes_of_an_evaluation_come_back_problem_by_problem(tmp_path):
    def answered(index, *rewards, **fields):
        return [judged(index, number, "3", reward, **fields) for number, reward in enumerate(rewards)]

    path = outcomes_path(tmp_path, 60)
    samples = [
        *answered(4, 1.0, 0.0, None),
        *answered(9, 1.0, 1.0),
        *answered(2, None),
        *answered(4, 0.0, kind="greedy"),
        *answered(4, 1.0, kind="correction"),
    ]
    one = unnamed(accuracy(0.5, 0.5), samples)[0]
    save_outcomes(tmp_path, 60, [one])
    assert path.name == "step_000060.json"
    assert json.loads(path.read_text())["problems"]["4"] == {"sampled": [1, 0, None], "greedy": [0]}
    loaded = load_outcomes(path)
    assert math.isnan(loaded.pop(2))
    assert loaded == {4: 0.5, 9: 1.0}


def test_outcomes_that_are_none_say_where(tmp_path):
    (tmp_path / "x.json").write_text('{"problems": [1]}')
    for name in ("x.json", "missing.json"):
        with pytest.raises(ValueError, match=name):
            load_outcomes(tmp_path / name)
