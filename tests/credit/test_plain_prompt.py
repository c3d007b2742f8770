"""Corrections as off-policy samples of the plain prompt, and suffixes of resets: credit, loss and cost."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_engines import SimulatedEngine, in_virtual_time

from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.loss import VARIANTS
from megatron_ibpo.policy.importance_correction import correct
from megatron_ibpo.policy.packing import lay_out, pack
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.sampling import Sampler
from megatron_ibpo.sampling.requests import with_beginning
from support.credit_cases import (
    AGREEMENT,
    EOS,
    GSPO,
    PROMPT,
    RESET_GROUPS,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    fix_last,
    group,
    ids_of,
    in_turn,
    plain,
    response,
    tokens_spent,
)
from support.layouts import layout
from support.linear_cases import batch_of, fused
from support.linear_cases import plain as of_logits
from support.loss_calls import loss_of_logits
from support.ranks import run_ranks
from support.sampling_cases import STEP, judge, make_prompts
from support.tiny_models import make_qwen3
from support.train_sequences import packed, sequence, sequences
from support.trainers import COMPARED, gradients

NEAR, FAILS, FAR = [10, 11, 12, 14], [10, 11, 15, 15], [20, 21, 22, 23]
JOINING = {"ibpo_lambda": 0.0, "ibpo_joint": False, "ibpo_plain_prompt": "successful"}
RESETS = GSPO | {"ibpo_operator": RESET_GROUPS, "ibpo_corrections": 2}


def joined(*contents, answers=None, rewards=None, **settings):
    """Credit of a group whose corrections are, by the last token of what they correct, these answers."""
    loop = Loop(lambda x: answers[candidates(x)[0][-1]] if answers else fix_last(x), rewards)
    return loop.credit([group(*contents)], algorithm(**JOINING | settings))


def advantages_of(credit):
    return [sequence.advantage for sequence in credit.sequences]


def test_a_successful_correction_joins_its_group_by_hand():
    """Rewards 1 0 0 0. The correction of y1 is right and near, that of y2 wrong, that of y3 right and a
    rewrite: five rewards 1 0 0 0 1, of mean .4 and standard deviation √.24."""
    credit = joined(RIGHT, NEAR, FAILS, FAR, answers={14: RIGHT, 15: FAILS, 23: RIGHT})
    up, down = 0.6 / math.sqrt(0.24), -0.4 / math.sqrt(0.24)
    assert advantages_of(credit) == pytest.approx([up, down, down, down, up], abs=1e-7)
    (one,) = by_kind(credit, "correction")
    assert (ids_of(one.prompt_token_ids), ids_of(one.response_token_ids)) == (PROMPT, (*RIGHT, EOS))
    assert (one.off_policy, one.index, one.weight, one.reward) == (True, 0, 0.25, 1)
    assert not any(s.off_policy for s in by_kind(credit, "response"))
    assert credit.metrics["joined_corrections"] == 1


def test_joining_gives_a_wrong_group_something_to_compare_and_leaves_alone_what_has_no_success():
    credit = joined(NEAR, NEAR)
    assert advantages_of(credit) == pytest.approx([-1, -1, 1, 1], abs=1e-7)
    assert credit.metrics["degenerate_groups"] == 0
    gspo = plain(Loop(fix_last).credit([group(RIGHT, NEAR)], algorithm(**GSPO)).sequences)
    assert plain(joined(RIGHT, NEAR, answers={14: FAILS}).sequences) == gspo
    unscored = joined(RIGHT, NEAR, rewards=lambda answer: None)
    assert plain(unscored.sequences) == gspo
    assert unscored.metrics["joined_corrections"] == 0
    # shaping and joining add up: r' = 1 .3 0, and 1 joins: mean .575
    shaping = {"ibpo_lambda": 0.6, "ibpo_beta": 0.5, "advantages": "group-mean"}
    credit = joined(RIGHT, NEAR, FAR, answers={14: RIGHT, 23: FAR}, **shaping)
    assert advantages_of(credit) == pytest.approx([0.425, -0.275, -0.575, 0.425])


def test_critique_grpo_takes_one_refinement_of_a_group_a_right_one_if_there_is_one():
    """Rewards 1 0 0 and that of the second refinement, 1: less their mean, .5 -.5 -.5 .5. In a group without
    a right refinement the first joins and is punished: 1 0 0 less 1/3."""
    one = {"ibpo_plain_prompt": "one", "advantages": "group-mean"}
    right = joined(RIGHT, NEAR, FAR, answers={14: FAILS, 23: RIGHT}, **one)
    assert advantages_of(right) == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert [s.index for s in by_kind(right, "correction")] == [1]
    wrong = joined(RIGHT, NEAR, answers={14: FAILS}, **one)
    assert advantages_of(wrong) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert wrong.sequences[2].off_policy


def test_the_meter_counts_what_the_recipes_say():
    """|x| = 3, |y| = 5 with its end, 4 without. GSPO reads 3, writes and trains 2·5 and 2·8. A correction
    that joins reads x̃ of 3 + 2·(1 + 4), writes |y|, trains |x| + |y|. Of a reset after f = 3 tokens, K = 2
    suffixes read |x| + f once, write K(|y| - f), train K(|x| + |y|)."""

    def spent(correct, settings):
        made = [group(RIGHT, NEAR)]
        return tokens_spent(made, Loop(correct).credit(made, algorithm(**settings)))

    gspo = spent(fix_last, GSPO)
    assert gspo == 3 + 2 * 5 + 2 * 8
    assert spent(fix_last, JOINING) - gspo == (3 + 2 * 5) + 5 + (3 + 5)
    assert spent(in_turn([13], [14]), RESETS) - gspo == (3 + 3) + 2 * (5 - 3) + 2 * (3 + 5)


def two_tokens(advantage=2.0, **given):
    """(loss, slopes by the first logits, stats) of an off-policy sequence of two response tokens with the
    probabilities .1 and .4, of a vocabulary of two."""
    logits = torch.tensor([[0.1, 0.9], [0.4, 0.6]], dtype=torch.float64).log().requires_grad_()
    loss, stats = loss_of_logits(
        logits_NV=logits,
        targets_N=torch.zeros(2, dtype=torch.int64),
        response_mask_N=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        sequence_weights_S=torch.tensor([0.5], dtype=torch.float64),
        off_policy_S=torch.tensor([True]),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        **given,
    )
    loss.backward()
    return loss.item(), logits.grad[:, 0].tolist(), stats


@pytest.mark.parametrize("variant", ["gspo", "gspo-token", "grpo", "gmpo", "cispo"])
def test_the_shaped_surrogate_by_hand(variant):
    """Probabilities .1 and .4, A = 2, weight ½: f = .1/.2 and .4/.5, so the loss is -½·2·(.5 + .8)/2 = -.65.
    Its derivative by log p is -½·2/2·γp/(p + γ)² = -½·.25 and -½·.16, by the logit that times 1 - p."""
    given = {"aggregation": "sequence-mean"} | ({"params": {"eps_high": 0.2}} if variant != "gmpo" else {})
    loss, slopes, stats = two_tokens(variant=variant, **given)
    assert loss == pytest.approx(-0.65)
    assert slopes == pytest.approx([-0.125 * 0.9, -0.08 * 0.6])
    assert not stats.clipped.any()


def test_weights_scale_the_gradient_of_the_surrogate_and_ratios_do_not_clip_it():
    halved = torch.tensor([0.5, 0.0], dtype=torch.float64)
    loss, slopes, _ = two_tokens(token_weights_N=halved)
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.0625 * 0.9, 0.0]))
    assert two_tokens(advantage=0.0)[:2] == (0.0, [0.0, 0.0])
    # old log-probs far off: the variant's ratio would be clipped, the shaped surrogate has none
    loss, slopes, _ = two_tokens(old_logprobs_N=torch.tensor([-9.0, -9.0], dtype=torch.float64))
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.1125, -0.048]))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_sequences_of_both_kinds_lose_what_each_loses_alone(variant):
    batch = batch_of((3, 6, 2, 4))
    batch["advantages"][1] = 0.7
    kinds, everything = torch.tensor([False, True, False, True]), torch.ones(4, dtype=torch.bool)

    def loss_of(chosen, off_policy):
        weights = torch.where(chosen, batch["sequence_weights_S"], 0.0)
        chosen_batch = batch | {"sequence_weights_S": weights}
        return of_logits(chosen_batch, off_policy_S=off_policy, variant=variant, aggregation=5.0)[0]

    mixed = loss_of(everything, kinds)
    torch.testing.assert_close(mixed, loss_of(~kinds, None) + loss_of(kinds, everything))


@pytest.mark.parametrize("variant", ["gspo", "grpo", "gmpo", "cispo"])
def test_the_fused_head_gives_the_same(variant):
    batch = batch_of((1, 5, 17, 2, 30, 3)) | {"off_policy_S": torch.tensor([0, 1, 0, 1, 1, 0]).bool()}
    batch["advantages"][:] = torch.tensor([1.0, 0.5, -0.5, -1.0, 2.0, 0.0])
    settings = {"variant": variant, "kl_coef": 0.05, "aggregation": "sequence-mean"}
    expected = of_logits(batch, **settings)
    for chunk in (4, 7, 1000):
        for ours, theirs in zip(fused(batch, chunk=chunk, **settings)[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_the_engines_log_probs_are_of_the_long_prompt():
    """So importance corrections leave off-policy sequences alone, rows that are compared with the engine
    leave them out, and the engine's cannot be the old ones. Ratios 5 and 5 would be cut to 2."""
    arrays = replace(packed([5.0, 5.0], [5.0, 5.0]), off_policy_S=np.array([False, True]))
    corrected, found = correct(arrays, LossConfig(use_tis=True, tis_clip=2.0))
    assert corrected.token_weights_R.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert [own.weight for own in found] == [4.0, 2.0]

    rows = [sequence([7, 8], [3, 4], advantage=1.0, weight=1.0, group=0, off_policy=n == 1) for n in range(2)]
    mixed, plainly = (
        lay_out(pack(MicroBatch((0, 1), tuple(own))), multiple=4, device=torch.device("cpu"))
        for own in (rows, [replace(row, off_policy=False) for row in rows])
    )
    assert mixed.rows.off_policy_S.tolist() == [False, True, False]  # the last is padding
    assert mixed.loss_rows().tolist() == [1, 2, 4, 5]
    assert mixed.compared_rows_R.tolist() == [1, 2]
    assert plainly.rows.off_policy_S is None

    config = Config(algorithm=algorithm(**JOINING), loss=LossConfig(old_logprobs="engine"))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    with pytest.raises(ValueError, match="use --old-logprobs recompute"):
        check_settings(config)


@pytest.mark.world
@pytest.mark.slow
def test_every_layout_gives_the_same_gradient_and_metrics(tmp_path):
    """One process against DP2, TP2 and PP2, with importance corrections; and the mark matters."""
    rows = [replace(row, off_policy=number % 3 == 0) for number, row in enumerate(sequences())]
    case = (make_qwen3(tmp_path / "dense", 3, std=0.1),)
    settings = {"use_tis": True, "max_tokens": 60}
    (expected, metrics), (unmarked, _) = (
        run_ranks(gradients, 1, [(*case, layout(), settings)], chosen, timeout=240)[0][0]
        for chosen in (rows, [replace(row, off_policy=False) for row in rows])
    )
    scale = max(g.abs().max().item() for g in expected.values())
    assert max((unmarked[n] - expected[n]).abs().max().item() for n in expected) > 0.05 * scale
    for chosen in (layout(), layout(tp=2), layout(pp=2)):
        moved, found = run_ranks(gradients, 2, [(*case, chosen, settings)], rows, timeout=240)[0][0]
        assert max((moved[n] - expected[n]).abs().max().item() for n in expected) <= 2e-4 * scale, chosen
        for name in {*COMPARED} & metrics.keys():
            assert found[name] == pytest.approx(metrics[name], rel=2e-4, abs=1e-6), (chosen, name)


def test_a_wrong_response_goes_on_where_it_leaves_a_right_one_by_hand():
    """10 11 12 14 shares 10 11 12 with the second right response, more than with the first, and 20 21 shares
    nothing. Of the former, one suffix of two is right: ½ and -½, on the suffix alone. Of the latter,
    neither."""
    loop, contents = Loop(in_turn([13], [14], [20], [21, 22])), ([10, 13], RIGHT, NEAR, [20, 21])
    credit = loop.credit([group(*contents)], algorithm(**RESETS))
    assert loop.asked == [(*PROMPT, 10, 11, 12)] * 2 + [PROMPT] * 2
    assert [r.max_tokens for r in loop.requests] == [5, 5, 8, 8]
    assert len({r.seed for r in loop.requests}) == 4
    suffixes = by_kind(credit, "correction")
    assert [s.advantage for s in suffixes] == [0.5, -0.5, 0.0, 0.0]
    assert [ids_of(s.prompt_token_ids) for s in suffixes] == [PROMPT] * 4
    assert ids_of(suffixes[0].response_token_ids) == (10, 11, 12, 13, EOS)
    assert ids_of(suffixes[0].loss_mask) == (False, False, False, True, True)
    assert suffixes[0].num_trained_tokens == 2
    assert {s.weight for s in credit.sequences} == {1 / 4}
    expected = {
        "reset_success": 0.25, "reset_shared_length": 1.5, "degenerate_correction_groups": 1,
        "tokens_reset_suffixes": 2 + 2 + 2 + 3,
    }  # fmt: skip
    assert expected.items() <= credit.metrics.items()
    gspo = Loop(in_turn()).credit([group(*contents)], algorithm(**GSPO))
    assert plain(by_kind(credit, "response")) == plain(gspo.sequences)


def test_without_a_right_response_or_without_room_nothing_is_reset():
    loop, cut_off = Loop(in_turn()), group(RIGHT)
    cut_off.responses.append(response([10, 11, 12], 0.0, "length"))  # all of it is shared
    credit = loop.credit([group(NEAR, NEAR), cut_off], algorithm(**RESETS))
    assert loop.requests == []
    assert credit.metrics["skipped_pairs"] == 1
    assert "reset_success" not in credit.metrics


def test_the_sampler_gives_a_begun_response_back_whole():
    """So that the verifier reads all of it, and only what was sampled now is trained on."""
    (prompt,) = make_prompts(0, 1)
    seen = []

    async def score(prompt, sample):
        seen.append(ids_of(sample.token_ids))
        judge(prompt, sample)

    sampler = Sampler([SimulatedEngine(STEP, lambda request: [41, 42])], score, stall_timeout=100.0)
    asked = [
        SampleRequest(np.concatenate([prompt.token_ids, token_ids([31, 32, 33])]), 1, 9, begun=3),
        SampleRequest(prompt.token_ids, 2, 9),
    ]

    async def work():
        return await asyncio.wait_for(sampler.answer(prompt, asked), 1000)

    begun, fresh = in_virtual_time(work())[0]
    assert sorted(seen) == [(31, 32, 33, 41, 42), (41, 42)]
    assert ids_of(begun.prompt_token_ids) == ids_of(prompt.token_ids)
    assert ids_of(begun.loss_mask) == (False, False, False, True, True)
    assert len(begun.logprobs) == 5
    assert (begun.num_begun_tokens, fresh.num_begun_tokens) == (3, 0)
    assert fresh.loss_mask.all()
    # spans of versions keep their places
    sample = response([41, 42, 43], prompt=(1, 2, 31, 32))
    sample.versions = ((0, 6), (2, 7))
    whole = with_beginning(sample, 2)
    assert whole.versions == ((0, 6), (4, 7))
    assert whole.tokens_by_version() == [(6, 4), (7, 2)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (JOINING | {"ibpo_joint": True}, "a correction is trained on once"),
        (JOINING | {"ibpo_operator": AGREEMENT}, "--ibpo-operator compare-and-correct has it"),
        (JOINING | {"advantages": "critic"}, "--advantages critic compares none"),
        (RESETS | {"ibpo_corrections": 1}, r"--ibpo-corrections: must be between 2 and .*, is 1"),
        (RESETS | {"ibpo_joint": False}, f"--ibpo-joint: gspo with --ibpo-operator {RESET_GROUPS} has no"),
    ],
)
def test_what_cannot_be_had_together_is_refused(settings, says):
    for fine in (JOINING, RESETS):
        check_algorithm(algorithm(**fine))
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))
