"""The loop on live rollouts: what it asks, scores and trains on, and what it does again after a death."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace

import pytest

from megatron_ibpo.basics.records import token_ids
from megatron_ibpo.journal import LostStepError, read_journal
from megatron_ibpo.run.inputs import open_journal
from megatron_ibpo.run.run_data import open_run_data
from support.credit_cases import RESET_GROUPS
from support.live_loop import Trainers, config_of, live_run, plain, questions, reward, written

AHEAD = ("--max-staleness", "2")
OVER = ("--max-staleness", "1", "--over-sampling-batch-size", "6")
EVERY_TWO = ("--save-interval", "2")


def indices(groups):
    return [group.prompt.index for group in groups]


def compared(groups):
    """All of a step that a run which goes on must give again."""
    return [
        (
            group.prompt.index,
            group.prompt.text,
            [plain(sample) for sample in group.samples],
            [(correction.target, correction.references) for correction in group.corrections],
        )
        for group in groups
    ]


def goes_on(run_dir, flags, journal="kept", count=4):
    """A run that is killed after its third step, with a checkpoint of the second; the samples in its journal;
    and one that goes on."""
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
    """Six steps without a break: (flags, steps)."""
    flags = (*request.param, "--num-rollout", "6")
    with live_run(config_of(tmp_path_factory.mktemp("whole"), *flags, "--no-save")) as steps:
        steps.take(6)
        yield flags, steps


def test_every_step_asks_prompts_and_seeds_that_no_other_has_asked_in_the_order_of_the_source(whole):
    _, steps = whole
    assert [index for groups in steps.groups for index in indices(groups)] == list(range(24))
    asked = {group.prompt.text for group in steps.all_groups}
    assert len(asked) == 24
    assert asked < {row["prompt"] for row in questions("train")}
    seeds = [request.seed for request in steps.engines.asked]
    assert len(set(seeds)) == len(seeds) >= 6 * 4 * 3
    assert {request.temperature for request in steps.engines.asked} == {0.7}


def test_the_verifier_reads_the_whole_response_and_trainers_get_what_was_sampled_in_that_step(whole):
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
        right = {index for index, one in enumerate(group.responses) if one.correct}
        targets = {correction.target for correction in group.corrections}
        assert targets.isdisjoint(right)
        assert not right or targets == set(range(3)) - right
        for correction in group.corrections:
            shown = " ".join(map(str, correction.response.prompt_token_ids.tolist()))
            for index in (correction.target, *correction.references):
                content = group.responses[index].content_ids.tolist()
                assert " ".join(map(str, content)) in shown
    assert sum(len(group.corrections) for group in steps.all_groups) > 20


@pytest.mark.parametrize(("flags", "bound"), [((), 0), (AHEAD, 2), (OVER, 1)], ids=["0", "2", "1 of 6"])
def test_no_sample_is_older_than_staleness_allows_and_some_are_as_old(flags, bound, tmp_path):
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


def test_a_journal_of_other_settings_is_not_used_and_a_line_names_them(tmp_path):
    with live_run(config_of(tmp_path, *EVERY_TWO)) as killed:
        killed.take(3)
    with ExitStack() as stack:
        warmer = replace(killed.run.config.rollout, rollout_temperature=0.9)
        _, recovered = open_journal(replace(killed.run.config, rollout=warmer), 2, stack)
    assert (recovered.batches, recovered.samples) == ((), {})
    (note,) = recovered.notes
    assert note.endswith("sampled after step 2 is not used, since rollout_temperature changed")


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_a_run_that_goes_on_takes_up_the_order_of_data_where_it_was(whole, journal, tmp_path):
    flags, undisturbed = whole
    killed, left, steps = goes_on(tmp_path, flags, journal)
    assert list(map(indices, steps.groups)) == list(map(indices, undisturbed.groups[2:]))
    for group, other in zip(steps.all_groups, undisturbed.all_groups[2 * 4 :], strict=True):
        for sample, before in zip(group.samples, other.samples, strict=True):
            assert sample.token_ids.tolist() == before.token_ids.tolist()
            assert sample.reward == before.reward
    if journal == "kept":
        assert compared(steps.groups[0]) == compared(killed.groups[2])
        assert steps.trainers.updates[0] == killed.trainers.updates[2]
    asked = {(r.prompt_token_ids.tobytes(), token_ids(written(r)).tobytes()) for r in steps.engines.asked}
    assert asked.isdisjoint((s.prompt_token_ids.tobytes(), s.token_ids.tobytes()) for s in left.values())
    assert len(left) > 4 * 3 or journal == "lost" or "--max-staleness" not in flags, "others had begun"


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_a_run_that_goes_on_leaves_no_prompt_out_and_takes_none_twice(journal, tmp_path):
    """Sampling ahead, each batch takes what is ready: most prompts of a time are under way at the kill."""
    killed, _, steps = goes_on(tmp_path, (*AHEAD, "--num-rollout", "6"), journal)
    taken = [index for groups in [*killed.groups[:2], *steps.groups] for index in indices(groups)]
    assert sorted(taken) == list(range(24))


def test_a_run_that_goes_on_draws_the_same_references_again_for_prompts_of_another_step(tmp_path):
    """Groups of equal rewards are left out, and prompts of the next step take their places."""
    flags = (*AHEAD, "--keep-order", "--n-samples-per-prompt", "5", "--num-rollout", "6")
    flags += ("--dynamic-sampling", "--dynamic-sampling-by", "rewards")
    killed, _, steps = goes_on(tmp_path, flags, count=1)
    assert max(indices(killed.groups[2])) >= 3 * 4, "the third step has those of the first twelve"
    assert compared(steps.groups[0]) == compared(killed.groups[2])


@pytest.mark.parametrize("saved", [True, False], ids=["after a checkpoint", "before the first"])
def test_trainers_that_died_train_again_on_what_they_had(whole, saved, tmp_path):
    flags, undisturbed = whole
    trainers, save = Trainers(dies_at=3), EVERY_TWO if saved else ("--no-save",)
    with live_run(config_of(tmp_path, *flags, *save), trainers) as steps:
        steps.take(4)
    assert trainers.restarted_from == [tmp_path / "checkpoints/step_000002" if saved else None]
    assert steps.engines.met == 1
    expected, first = undisturbed.trainers.updates, 2 if saved else 0
    assert trainers.updates == [*expected[:3], *expected[first:3], expected[3]]


def test_a_step_that_the_journal_has_lost_ends_the_run_and_is_named(tmp_path):
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
def test_a_run_whose_operator_asks_for_more_samples_finishes_with_its_summary(tmp_path, operator):
    flags = ("--ibpo-operator", operator, "--ibpo-corrections", "2", "--num-rollout", "1", "--no-save")
    with live_run(config_of(tmp_path, *flags)) as steps:
        steps.take(1)
        assert any(group.corrections for group in steps.groups[0])
        steps.run.finish("finished")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (summary["break_even"] is None) == (operator != "compare-and-correct")


def test_all_prompts_are_played_in_the_environment_of_the_run_or_in_their_own(tmp_path):
    own = {"environment": "its:Own", "level": 1}
    held_out = [{"prompt": "1+1", "label": 2}, {"prompt": "1+2", "label": 3, "metadata": own}]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    (tmp_path / "whole.py").write_text("def extract_answer(response): return response\nscore = None")
    flags = ("--rm-type", f"{tmp_path / 'whole.py'}:score", "--rollout-max-context-len", "128")
    flags += ("--eval-prompt-data", str(tmp_path / "held_out.jsonl"), "--eval-num-prompts", "2")
    data = open_run_data(config_of(tmp_path, *flags, "--environment", "a:Game"))
    (evaluated,) = data.eval_sets
    assert [prompt.metadata for prompt in evaluated.prompts] == [{"environment": "a:Game"}, own]
    assert evaluated.answer is None, "the environment scores"
    assert {prompt.metadata["environment"] for prompt in data.prompts.batch(0, 4)} == {"a:Game"}
    (without,) = open_run_data(config_of(tmp_path, *flags)).eval_sets
    assert without.prompts[0].metadata == {}
    assert without.answer is not None
