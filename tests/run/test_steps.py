"""A run that is stepped from Python, and a start that failed, with stand-ins for the processes."""

import asyncio
import json
from contextlib import contextmanager

import pytest

import megatron_ibpo as mi
from megatron_ibpo.report import read_rows
from megatron_ibpo.run.inputs import bytes_kept
from megatron_ibpo.run.loop import Run
from support.live_loop import StandIns, config_of, in_place
from support.paths import ROOT

TWO = ("--num-rollout", "2", "--save-interval", "1")


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes a second."""
    monkeypatch.setattr("megatron_ibpo.report.run_curves.plot_curves", lambda *_, **__: False)


def rows_of(config):
    return [(row["kind"], row["step"]) for row in read_rows(config.run.run_dir / "metrics.jsonl")]


def status_of(config):
    return json.loads((config.run.run_dir / "summary.json").read_text())["status"]


def test_a_step_is_its_row_its_samples_and_its_sequences(tmp_path):
    config = config_of(tmp_path, *TWO)
    with in_place(StandIns()), mi.open_run(config) as run:
        steps = list(run)
        assert run.rows == [step.metrics for step in steps]
        assert run.config.run.num_rollout == 2
    assert [step.metrics for step in steps] == read_rows(tmp_path / "metrics.jsonl")
    assert [step.metrics["step"] for step in steps] == [1, 2]
    for step in steps:
        rewards = [response.reward for group in step.groups for response in group.responses]
        assert step.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert {sequence.prompt_index for sequence in step.sequences} == {g.prompt.index for g in step.groups}
    assert status_of(config) == "finished"
    with pytest.raises(ValueError, match="this run is closed"):
        next(run)


@contextmanager
def opened(config, backend=None):
    with in_place(backend or StandIns()), mi.open_run(config) as run:
        yield run


def test_a_notebook_has_an_event_loop_that_runs_already(tmp_path):
    async def cell():
        with opened(config_of(tmp_path, *TWO)) as run:
            return [step.metrics["step"] for step in run]

    assert asyncio.run(cell()) == [1, 2]


def test_a_run_that_is_left_early_goes_on_where_it_was(tmp_path):
    config = config_of(tmp_path, "--num-rollout", "3")
    with opened(config) as run:
        for step in run:
            assert step.metrics["step"] == 1
            break
        assert next(run).metrics["step"] == 2
    assert status_of(config) == "interrupted"
    with opened(config_of(tmp_path, "--num-rollout", "3", "--load", str(tmp_path))) as run:
        assert [step.metrics["step"] for step in run] == [3]
    assert rows_of(config) == [("step", 1), ("step", 2), ("step", 3)]


@pytest.mark.parametrize(
    ("within", "error", "status"),
    [
        ("a step", KeyboardInterrupt(), "stopped at once"),
        ("the program", RuntimeError("no luck"), "failed: RuntimeError: no luck"),
    ],
    ids=["Ctrl-C in a step", "error between steps"],
)
def test_what_was_sampled_before_an_error_is_not_sampled_again(
    tmp_path, monkeypatch, capsys, within, error, status
):
    """The journal has the first step's samples, and there is no checkpoint."""

    def fail(*_):
        raise error

    def step_in_vain():
        with mi.open_run(config) as run:
            runs.append(run)
            next(run)
            fail()

    config, backend, again, runs = config_of(tmp_path, "--num-rollout", "2"), StandIns(), StandIns(), []
    with in_place(backend), monkeypatch.context() as patched:
        if within == "a step":
            patched.setattr(Run, "update", fail)
        with pytest.raises(type(error)):
            step_in_vain()
    assert backend.engines.asked
    assert status_of(config) == status
    assert "To resume from the journal" in capsys.readouterr().out
    with pytest.raises(ValueError, match="this run is closed"):
        next(runs[0])
    with opened(config_of(tmp_path, "--num-rollout", "1", "--load", str(tmp_path)), again) as run:
        assert [step.metrics["step"] for step in run] == [1]
    assert again.engines.asked == []


def test_a_recipe_takes_settings_as_flags_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = "examples/recipes/small_cpu.yaml"
    config = mi.load_recipe(recipe, run_dir="a", num_rollout=2, ibpo_lambda=0.3, eval_num_prompts=0)
    flags = "--run-dir a --num-rollout 2 --ibpo-lambda 0.3 --eval-num-prompts 0"
    assert config == mi.parse_config(["--config", str(ROOT / recipe), *flags.split()])
    files = mi.load_recipe(recipe, prompt_data=("b.jsonl", "c.jsonl")).data.prompt_data
    assert files == (str(tmp_path / "b.jsonl"), str(tmp_path / "c.jsonl"))
    for path, settings, says in (
        (recipe, {"num_rolout": 2}, "unknown key 'num_rolout'; did you mean 'num-rollout'"),
        (recipe, {"num_rollout": "two"}, "num_rollout: 'two' is not a whole number"),
        ("none.yaml", {}, r"--config .*none.yaml: cannot be read"),
    ):
        with pytest.raises(mi.ConfigError, match=says):
            mi.load_recipe(path, **settings)


def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path):
    config = config_of(tmp_path / "run", "--num-steps-per-rollout", "3", "--eps-clip", "2")
    with pytest.raises(mi.ConfigError, match="--num-steps-per-rollout"):
        mi.open_run(config)
    (tmp_path / "empty").mkdir()
    config = config_of(tmp_path / "run", "--load", str(tmp_path / "empty"))
    with in_place(StandIns()), pytest.raises(ValueError, match=r"there is no step_N with a run_state.json"):
        mi.open_run(config)
    assert not (tmp_path / "run").exists()


def start_in_vain(config):
    def fail():
        raise ArithmeticError("engine 0 did not start")

    with in_place(StandIns(wait_ready=fail)), pytest.raises(ArithmeticError):
        mi.open_run(config)


def test_after_a_start_that_failed_the_same_command_starts_the_run_and_so_does_load(tmp_path, capsys):
    config = config_of(tmp_path / "same", *TWO)
    for _ in range(2):
        start_in_vain(config)
    with opened(config) as run:
        assert len(list(run)) == 2
    assert rows_of(config) == [("step", 1), ("step", 2)]
    with in_place(StandIns()), pytest.raises(mi.ConfigError, match="already holds a run"):
        mi.open_run(config)
    there = tmp_path / "load"
    start_in_vain(config_of(there, *TWO))
    with opened(config_of(there, *TWO, "--load", str(there))) as run:
        assert next(run).metrics["step"] == 1
    said = capsys.readouterr().out
    assert f"--load {there}: no checkpoint was saved there; the run starts at step 0\n" in said


def test_a_run_of_adapters_needs_room_for_checkpoints_of_adapters_and_for_a_whole_export(tmp_path):
    """4 layers, each with a q_proj of 128 x 96; fp32 weights of 4 bytes and 8 of Adam's."""
    config = config_of(tmp_path, "--num-rollout", "1")
    assert bytes_kept(config, 10**6) == (12 + 4) * 10**6
    adapters = config_of(tmp_path, "--num-rollout", "1", "--lora-rank", "2", "--lora-targets", "q_proj")
    assert bytes_kept(adapters, 10**6) == 12 * 4 * 2 * (128 + 96) + 4 * 10**6
