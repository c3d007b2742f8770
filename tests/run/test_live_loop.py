"""The loop on live rollouts: what it asks, scores and trains on, and what it does again after a death."""

import asyncio
import json
import math
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest

import megatron_ibpo as mi
from megatron_ibpo.basics.records import token_ids
from megatron_ibpo.journal import LostStepError, read_journal
from megatron_ibpo.plan.parameter_count import count_parameters
from megatron_ibpo.report import RewardErrorRateError, read_rows
from megatron_ibpo.run import saving
from megatron_ibpo.run import steps as loop
from megatron_ibpo.run.inputs import RunData, open_journal, open_run_data
from megatron_ibpo.run.preflight import disk_bytes
from megatron_ibpo.run.resolve import read_foundation
from megatron_ibpo.run.steps import NotFiniteError
from support.credit_cases import RESET_GROUPS
from support.credit_cases import plain as all_of
from support.live_loop import StandIns, Trainers, config_of, in_place, live_run, questions, reward, written
from support.paths import ROOT

AHEAD = ("--max-staleness", "2")
OVER = ("--max-staleness", "1", "--over-sampling-batch-size", "6")
EVERY_TWO = ("--save-interval", "2")


def indices(groups):
    return [group.prompt.index for group in groups]


def goes_on(run_dir, flags, journal="kept", count=4):
    """A run that is killed after its third step, what its journal has, and one that goes on."""
    with live_run(config_of(run_dir, *flags, *EVERY_TWO)) as killed:
        killed.take(3)
    if journal == "lost":
        shutil.rmtree(run_dir / "journal")
    left = read_journal(run_dir / "journal", 2).samples
    with live_run(config_of(run_dir, *flags, *EVERY_TWO, "--load", str(run_dir))) as steps:
        assert steps.run.progress.step == 2
        steps.take(count)
    return killed, left, steps


@pytest.fixture(scope="module", params=[(), (*AHEAD, "--keep-order")], ids=["on policy", "ahead"])
def whole(request, tmp_path_factory):
    flags = (*request.param, "--num-rollout", "6")
    with live_run(config_of(tmp_path_factory.mktemp("whole"), *flags, "--no-save")) as steps:
        steps.take(6)
        yield flags, steps


def test_every_step_draws_new_prompts_and_seeds_in_source_order(whole):
    _, steps = whole
    assert [index for groups in steps.groups for index in indices(groups)] == list(range(24))
    assert {group.prompt.text for group in steps.all_groups} < {row["prompt"] for row in questions("train")}
    seeds = [request.seed for request in steps.engines.asked]
    assert len(set(seeds)) == len(seeds) >= 6 * 4 * 3
    assert {request.temperature for request in steps.engines.asked} == {0.7}


def test_trainers_get_the_steps_samples_with_rewards_of_whole_responses(whole):
    _, steps = whole
    label = {row["prompt"]: row["label"] for row in questions("train")}
    decode = steps.run.data.tokenizer.decode
    for groups, update in zip(steps.groups, steps.trainers.updates, strict=True):
        sampled = [(group.prompt.text, sample) for group in groups for sample in group.samples]
        for question, sample in sampled:
            assert sample.reward == reward(question, decode(sample.token_ids), label[question], {})
            assert sample.correct == (sample.reward == 1)
        written_now = {tuple(sample.token_ids.tolist()) for _, sample in sampled}
        assert {tuple(sequence["response_token_ids"]) for sequence in update} <= written_now
        assert {sequence["prompt_index"] for sequence in update} <= set(indices(groups))
        assert {sequence["temperature"] for sequence in update} <= {0.7}


def test_each_wrong_response_is_shown_with_its_reference_and_corrected(whole):
    _, steps = whole
    for group in steps.all_groups:
        wrong = {index for index, one in enumerate(group.responses) if not one.correct}
        targets = {correction.target for correction in group.corrections}
        assert targets <= wrong
        assert targets == wrong or len(wrong) == 3
        for correction in group.corrections:
            shown = " ".join(map(str, correction.response.prompt_token_ids.tolist()))
            for index in (correction.target, *correction.references):
                content = group.responses[index].content_ids.tolist()
                assert " ".join(map(str, content)) in shown
    assert sum(len(group.corrections) for group in steps.all_groups) > 20


@pytest.mark.parametrize(("flags", "bound"), [((), 0), (AHEAD, 2), (OVER, 1)], ids=["0", "2", "1 of 6"])
def test_the_oldest_sample_is_exactly_as_stale_as_allowed(flags, bound, tmp_path):
    with live_run(config_of(tmp_path, *flags, "--num-rollout", "8", "--no-save")) as steps:
        steps.take(8)
    ages = {
        step - version
        for step, groups in enumerate(steps.groups)
        for sample in (sample for group in groups for sample in group.samples)
        for version, _ in sample.tokens_by_version()
    }
    assert max(ages) == bound
    assert min(ages) >= 0


def test_a_journal_of_other_settings_is_ignored_with_a_note(tmp_path):
    with live_run(config_of(tmp_path, *EVERY_TWO)) as killed:
        killed.take(3)
    with ExitStack() as stack:
        warmer = replace(killed.run.config.rollout, rollout_temperature=0.9)
        _, recovered = open_journal(replace(killed.run.config, rollout=warmer), 2, stack)
    assert (recovered.batches, recovered.samples) == ((), {})
    assert "after step 2 is not used, since rollout_temperature changed" in recovered.notes[0]


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_a_resumed_run_continues_the_order_of_data(whole, journal, tmp_path):
    flags, undisturbed = whole
    killed, left, steps = goes_on(tmp_path, flags, journal)
    assert list(map(indices, steps.groups)) == list(map(indices, undisturbed.groups[2:]))
    for group, other in zip(steps.all_groups, undisturbed.all_groups[2 * 4 :], strict=True):
        for sample, before in zip(group.samples, other.samples, strict=True):
            assert (sample.token_ids.tolist(), sample.reward) == (before.token_ids.tolist(), before.reward)
    if journal == "kept":
        assert all_of(steps.groups[0]) == all_of(killed.groups[2])
        assert steps.trainers.updates[0] == killed.trainers.updates[2]
    asked = {(r.prompt_token_ids.tobytes(), token_ids(written(r)).tobytes()) for r in steps.engines.asked}
    assert asked.isdisjoint((s.prompt_token_ids.tobytes(), s.token_ids.tobytes()) for s in left.values())
    assert len(left) > 4 * 3 or journal == "lost" or "--max-staleness" not in flags, "others had begun"


def test_sampling_masks_reach_trainers_directly_and_from_the_journal(tmp_path):
    cut = ("--rollout-top-p-cycle", "1", "0.8", "--rollout-top-k", "9", "--use-tis", "--num-rollout", "6")
    killed, _, steps = goes_on(tmp_path, (*AHEAD, "--keep-order", *cut), count=1)
    assert steps.trainers.updates[0] == killed.trainers.updates[2]
    for sequence in killed.trainers.updates[2]:
        tokens, sets = sequence["response_token_ids"], sequence["sampling_mask"]
        assert all(token in own for token, own in zip(tokens, sets, strict=True))
    recorded = {
        key: sample.sampling_mask for key, sample in read_journal(tmp_path / "journal", 2).samples.items()
    }
    assert recorded
    assert None not in recorded.values()


def test_samples_of_a_journal_without_masks_are_not_trained_on(tmp_path):
    flags = ("--rollout-top-p", "0.8", "--num-rollout", "6", *EVERY_TWO)
    with (
        patch("support.live_loop.sampling_mask", lambda _: None),
        live_run(config_of(tmp_path, *flags)) as killed,
    ):
        killed.take(3)
    going_on = config_of(tmp_path, *flags, "--use-tis", "--load", str(tmp_path))
    with (
        live_run(going_on) as steps,
        pytest.raises(ValueError, match=r"^--rollout-top-p with --use-tis: .* no record"),
    ):
        steps.take(1)


@pytest.mark.parametrize("journal", [pytest.param("kept", marks=pytest.mark.slow), "lost"])
def test_a_resumed_run_neither_skips_nor_repeats_a_prompt(journal, tmp_path):
    """Sampling ahead, each batch takes what is ready: most prompts of a time are under way at the kill."""
    killed, _, steps = goes_on(tmp_path, (*AHEAD, "--num-rollout", "6"), journal)
    taken = [index for groups in [*killed.groups[:2], *steps.groups] for index in indices(groups)]
    assert sorted(taken) == list(range(24))


def test_a_resumed_run_draws_the_same_references_across_steps(tmp_path):
    flags = (*AHEAD, "--keep-order", "--n-samples-per-prompt", "5", "--num-rollout", "6")
    flags += ("--dynamic-sampling", "--dynamic-sampling-by", "rewards")
    killed, _, steps = goes_on(tmp_path, flags, count=1)
    assert max(indices(killed.groups[2])) >= 3 * 4, "the third step has those of the first twelve"
    assert all_of(steps.groups[0]) == all_of(killed.groups[2])


def test_a_resumed_run_remembers_the_success_of_corrections(tmp_path):
    gate = str(ROOT / "examples/credit/gated.py:Gated")
    killed, _, steps = goes_on(tmp_path, ("--ibpo-operator", gate, "--num-rollout", "6"), "lost", count=1)
    before, after = (run.run.progress.remembered[3] for run in (killed, steps))
    assert after == before
    assert sum(tries for _, tries in before.values()) > 10


@pytest.mark.parametrize("saved", [True, False], ids=["after a checkpoint", "before the first"])
def test_restarted_trainers_repeat_their_steps_from_recorded_samples(whole, saved, tmp_path):
    flags, undisturbed = whole
    trainers, save = Trainers(dies_at=3), EVERY_TWO if saved else ("--no-save",)
    with live_run(config_of(tmp_path, *flags, *save), trainers) as steps:
        steps.take(4)
    assert trainers.restarted_from == [tmp_path / "checkpoints/step_000002" if saved else None]
    assert steps.engines.met == 1
    expected, first = undisturbed.trainers.updates, 2 if saved else 0
    assert trainers.updates == [*expected[:3], *expected[first:3], expected[3]]


def test_a_step_lost_from_the_journal_ends_the_run(tmp_path):
    trainers = Trainers(dies_at=3)
    with live_run(config_of(tmp_path, "--num-rollout", "6", "--no-save"), trainers) as steps:
        steps.take(3)
        for segment in (tmp_path / "journal").glob("*.journal"):
            data = bytearray(segment.read_bytes())
            data[len(data) // 2] ^= 1
            segment.write_bytes(data)
        with pytest.raises(LostStepError, match="the trainers need step 2 again"):
            steps.take(1)


@pytest.mark.parametrize("operator", ["compare-and-correct", RESET_GROUPS])
def test_operators_that_sample_more_finish_a_run_with_a_summary(tmp_path, operator):
    flags = ("--ibpo-operator", operator, "--num-rollout", "1", "--no-save")
    with live_run(config_of(tmp_path, *flags)) as steps:
        steps.take(1)
        assert any(group.corrections for group in steps.groups[0])
        saving.finish(steps.run, "finished")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (summary["break_even"] is None) == (operator != "compare-and-correct")


def data_of(config) -> RunData:
    return open_run_data(config, read_foundation(config))


def test_prompts_play_in_the_runs_environment_or_their_own(tmp_path):
    own = {"environment": "its:Own", "level": 1}
    held_out = [{"prompt": "1+1", "label": 2}, {"prompt": "1+2", "label": 3, "metadata": own}]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    (tmp_path / "whole.py").write_text("def extract_answer(response): return response\nscore = None")
    flags = ("--rm-type", f"{tmp_path / 'whole.py'}:score", "--rollout-max-context-len", "128")
    flags += ("--eval-prompt-data", str(tmp_path / "held_out.jsonl"), "--eval-num-prompts", "2")
    with pytest.raises(ValueError, match=r"held_out.jsonl, line 2: environment 'its:Own': .*--allowed-env"):
        data_of(config_of(tmp_path, *flags))
    flags += ("--allowed-environments", "its:Own")
    for game, metadata in ((("--environment", "a:Game"), {"environment": "a:Game"}), ((), {})):
        data = data_of(config_of(tmp_path, *flags, *game))
        (evaluated,) = data.eval_sets
        assert [prompt.metadata for prompt in evaluated.prompts] == [metadata, own]
        assert (evaluated.answer is None) == bool(game), "the environment scores"
        assert data.prompts.batch(0, 1)[0].metadata == metadata


TWO = ("--num-rollout", "2", "--save-interval", "1")  # of runs that are stepped from Python


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes a second."""
    monkeypatch.setattr("megatron_ibpo.report.plots.plot_curves", lambda *_, **__: False)


def rows_of(config):
    return [(row["kind"], row["step"]) for row in read_rows(config.run.run_dir / "metrics.jsonl")]


def status_of(config):
    return json.loads((config.run.run_dir / "summary.json").read_text())["status"]


@contextmanager
def opened(config, backend=None):
    with in_place(backend or StandIns()), mi.open_run(config) as run:
        yield run


def test_a_step_is_its_row_its_samples_and_its_sequences(tmp_path):
    config = config_of(tmp_path, *TWO)
    with opened(config) as run:
        steps = list(run)
    assert run.rows == [step.metrics for step in steps] == read_rows(tmp_path / "metrics.jsonl")
    for step in steps:
        rewards = [response.reward for group in step.groups for response in group.responses]
        assert step.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert {sequence.prompt_index for sequence in step.sequences} == {g.prompt.index for g in step.groups}
    assert (rows_of(config), status_of(config)) == ([("step", 1), ("step", 2)], "finished")
    with pytest.raises(ValueError, match="this run is closed"):
        next(run)


def test_a_notebook_has_an_event_loop_that_runs_already(tmp_path):
    async def cell():
        with opened(config_of(tmp_path, *TWO)) as run:
            return [step.metrics["step"] for step in run]

    assert asyncio.run(cell()) == [1, 2]


def test_a_run_left_early_continues_where_it_was(tmp_path):
    config = config_of(tmp_path, "--num-rollout", "3")
    with opened(config) as run:
        assert [next(run).metrics["step"] for _ in range(2)] == [1, 2]
    assert status_of(config) == "interrupted"
    with opened(config_of(tmp_path, "--num-rollout", "3", "--load", str(tmp_path))) as run:
        assert [step.metrics["step"] for step in run] == [3]
    assert rows_of(config) == [("step", 1), ("step", 2), ("step", 3)]


@pytest.mark.parametrize(("error", "status"), [
    (KeyboardInterrupt(), "stopped at once"),
    (RuntimeError("no luck"), "failed: RuntimeError: no luck"),
])  # fmt: skip
def test_samples_drawn_before_an_error_are_reused(tmp_path, monkeypatch, capsys, error, status):
    """Without a checkpoint; an interrupt comes within a step, and the program fails after one."""
    fail, before, again = Mock(side_effect=error), StandIns(), StandIns()
    with monkeypatch.context() as patched:
        if isinstance(error, KeyboardInterrupt):
            patched.setattr(loop, "update", fail)
        with pytest.raises(type(error)), opened(config_of(tmp_path, "--num-rollout", "2"), before) as run:
            fail(next(run))
    assert before.engines.asked
    config = config_of(tmp_path, "--num-rollout", "1", "--load", str(tmp_path))
    assert status_of(config) == status
    assert "To resume from the journal" in capsys.readouterr().out
    with opened(config, again) as run:
        assert [step.metrics["step"] for step in run] == [1]
    assert again.engines.asked == []


def test_a_budget_stops_the_run_after_the_step_spending_it(tmp_path, monkeypatch):
    """The gradient meter is free."""

    def call_each(trainers, method, work):
        return [{"gradient_snr": 1.0}] if method == "measure_gradient" else update(trainers, method, work)

    flags = ("--num-rollout", "9", "--budget", "900", "--budget-unit", "tokens", "--no-save")
    flags += ("--lr-decay-style", "constant", "--lr-warmup-fraction", "0")
    update, found = Trainers.call_each, []
    monkeypatch.setattr(Trainers, "call_each", call_each)
    for name, meter in (("without", ()), ("with", ("--gradient-meter-interval", "1"))):
        with opened(config_of(tmp_path / name, *flags, *meter)) as run:
            rows = [step.metrics for step in run]
        assert status_of(run.config) == "finished", name
        assert all(("gradient_snr" in row) == (name == "with") for row in rows)
        found.append([row["spent_tokens"] for row in rows])
    assert found[0] == found[1]
    assert max(found[0][:-1], default=0) < 900 <= found[0][-1]


def test_a_policy_that_diverges_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainers, "call_each", lambda *_: [{"loss": math.nan, "updates_skipped": 1.0}])
    config = config_of(tmp_path, "--num-rollout", "9", "--max-nonfinite-steps", "2", "--no-save")
    with pytest.raises(NotFiniteError, match="2 steps in a row"), opened(config) as run:
        list(run)
    assert rows_of(config) == [("step", 1)]
    assert status_of(config).startswith("failed: NotFiniteError")


def test_a_verifier_that_fails_too_often_ends_the_run(tmp_path):
    fails = 'def score(_, response, *others): return float(response.startswith("The answer")) or 1 / 0'
    (tmp_path / "fails.py").write_text(fails)  # on all but the one response of the trial before the run
    config = config_of(tmp_path, *TWO, "--rm-type", f"{tmp_path / 'fails.py'}:score")
    with pytest.raises(RewardErrorRateError, match=r"12 of 12.*fails.py:1 in score"), opened(config) as run:
        next(run)
    assert status_of(config).startswith("failed: RewardErrorRateError")


def test_a_recipe_takes_settings_as_flags_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = "examples/recipes/small_cpu.yaml"
    config = mi.load_recipe(recipe, run_dir="a", num_rollout=2, ibpo_lambda=0.3, eval_num_prompts=0)
    flags = f"--config {ROOT / recipe} --run-dir a --num-rollout 2 --ibpo-lambda 0.3 --eval-num-prompts 0"
    assert config == mi.parse_config(flags.split())
    files = mi.load_recipe(recipe, prompt_data=("b.jsonl", "c.jsonl")).data.prompt_data
    assert files == (str(tmp_path / "b.jsonl"), str(tmp_path / "c.jsonl"))
    with pytest.raises(mi.ConfigError, match="num_rollout: 'two' is not a whole number"):
        mi.load_recipe(recipe, num_rollout="two")


def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(mi.ConfigError, match="--num-steps-per-rollout"):
        mi.open_run(config_of(tmp_path / "run", "--num-steps-per-rollout", "3", "--eps-clip", "2"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "empty").mkdir()
    config = config_of(tmp_path / "run", "--load", str(tmp_path / "empty"))
    with in_place(StandIns()), pytest.raises(ValueError, match=r"there is no step_N with a run_state.json"):
        mi.open_run(config)


def test_a_failed_start_can_be_repeated_or_loaded(tmp_path, capsys):
    def start_in_vain(config):
        with in_place(StandIns(wait_ready=lambda: 1 / 0)), pytest.raises(ArithmeticError):
            mi.open_run(config)

    config, there = config_of(tmp_path / "same", *TWO), tmp_path / "load"
    start_in_vain(config)
    start_in_vain(config)
    with opened(config) as run:
        assert len(list(run)) == 2
    assert rows_of(config) == [("step", 1), ("step", 2)]
    with in_place(StandIns()), pytest.raises(mi.ConfigError, match="already holds a run"):
        mi.open_run(config)
    start_in_vain(config_of(there, *TWO))
    with opened(config_of(there, *TWO, "--load", str(there))) as run:
        assert next(run).metrics["step"] == 1
    said = capsys.readouterr().out
    assert f"--load {there}: no checkpoint was saved there; the run starts at step 0\n" in said


def test_adapter_runs_need_room_for_small_checkpoints_and_full_exports(tmp_path):
    """4 layers, each with a q_proj of 128 x 96; fp32 weights of 4 bytes and 8 of Adam's."""
    config = config_of(tmp_path, "--num-rollout", "1")
    shape = read_foundation(config).shape
    parameters, trained = count_parameters(shape, config)
    assert disk_bytes(config, shape) == (12 + 4) * parameters == (12 + 4) * trained
    adapted = config_of(tmp_path, "--num-rollout", "1", "--lora-rank", "2", "--lora-targets", "q_proj")
    assert disk_bytes(adapted, shape) == 12 * 4 * 2 * (128 + 96) + 4 * parameters
