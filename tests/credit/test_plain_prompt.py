"""Corrections as off-policy samples of the plain prompt: which join, the loss of their tokens, their cost."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ibpo.config import Config, LossConfig
from megatron_ibpo.loss import VARIANTS
from megatron_ibpo.policy.importance_correction import correct
from megatron_ibpo.policy.packing import lay_out, pack
from megatron_ibpo.policy.planning import MicroBatch
from megatron_ibpo.run.checks import check_settings
from support.credit_cases import (
    AGREEMENT,
    EOS,
    GSPO,
    PROMPT,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    fix_last,
    group,
    ids_of,
    plain,
    tokens_spent,
)
from support.layouts import layout
from support.linear_cases import batch_of, fused
from support.linear_cases import plain as of_logits
from support.loss_calls import loss_of_logits
from support.ranks import run_ranks
from support.tiny_models import make_qwen3
from support.train_sequences import packed, sequence, sequences
from support.trainers import COMPARED, gradients

NEAR, FAILS, FAR = [10, 11, 12, 14], [10, 11, 15, 15], [20, 21, 22, 23]


def joining(which="successful", **settings):
    return algorithm(**{"ibpo_lambda": 0.0, "ibpo_joint": False, "ibpo_plain_prompt": which} | settings)


def by_target(answers):
    return lambda x: answers[candidates(x)[0][-1]]


# -------------------------------------------------------------------------------------------- which join


def test_a_successful_correction_joins_its_group_by_hand():
    """Rewards 1 0 0 0. The correction of y1 is right and near, that of y2 wrong, that of y3 right and a
    rewrite: five rewards 1 0 0 0 1, of mean .4 and standard deviation √.24."""
    loop = Loop(by_target({14: [10, 11, 12, 13], 15: FAILS, 23: RIGHT}))
    credit = loop.credit([group(RIGHT, NEAR, FAILS, FAR)], joining())
    up, down = 0.6 / math.sqrt(0.24), -0.4 / math.sqrt(0.24)
    assert [s.advantage for s in by_kind(credit, "response")] == pytest.approx([up] + [down] * 3, abs=1e-7)
    (joined,) = by_kind(credit, "correction")
    assert joined.advantage == pytest.approx(up, abs=1e-7)
    assert (ids_of(joined.prompt_token_ids), ids_of(joined.response_token_ids)) == (PROMPT, (*RIGHT, EOS))
    assert (joined.off_policy, joined.index, joined.weight, joined.reward) == (True, 0, 0.25, 1)
    assert not any(s.off_policy for s in by_kind(credit, "response"))
    assert credit.metrics["joined_corrections"] == 1


def test_where_nothing_was_right_corrections_give_the_group_something_to_compare():
    credit = Loop(fix_last).credit([group(NEAR, NEAR)], joining())
    assert [s.advantage for s in credit.sequences] == pytest.approx([-1, -1, 1, 1], abs=1e-7)
    assert credit.metrics["degenerate_groups"] == 0


def test_what_the_verifier_failed_on_does_not_join():
    loop = Loop(fix_last, rewards=lambda answer: None)
    credit = loop.credit([group(RIGHT, NEAR)], joining())
    assert [s.kind for s in credit.sequences] == ["response"] * 2
    assert credit.metrics["joined_corrections"] == 0


def test_shaping_and_joining_add_up():
    """r' = 1 .3 0, and 1 joins: mean .575."""
    loop = Loop(by_target({14: [10, 11, 12, 13], 23: FAR}))
    credit = loop.credit(
        [group(RIGHT, NEAR, FAR)], joining(ibpo_lambda=0.6, ibpo_beta=0.5, advantages="group-mean")
    )
    assert [s.advantage for s in credit.sequences] == pytest.approx([0.425, -0.275, -0.575, 0.425])


def test_without_a_success_the_responses_are_those_of_gspo():
    failing = Loop(lambda x: FAILS).credit([group(RIGHT, NEAR)], joining())
    gspo = Loop(fix_last).credit([group(RIGHT, NEAR)], algorithm(**GSPO))
    assert plain(failing.sequences) == plain(gspo.sequences)


def test_critique_grpo_takes_one_refinement_of_a_group_a_right_one_if_there_is_one():
    """Rewards 1 0 0 and that of the second refinement, 1: less their mean, .5 -.5 -.5 .5. In a group without
    a right refinement the first joins and is punished: 1 0 0 less 1/3."""
    config = joining("one", advantages="group-mean")
    right = Loop(by_target({14: FAILS, 23: RIGHT})).credit([group(RIGHT, NEAR, FAR)], config)
    assert [s.advantage for s in right.sequences] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert [s.index for s in by_kind(right, "correction")] == [1]
    wrong = Loop(lambda x: FAILS).credit([group(RIGHT, NEAR)], config)
    assert [s.advantage for s in wrong.sequences] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert wrong.sequences[2].off_policy


def test_the_meter_counts_what_the_recipe_says():
    """|x| = 3, |y| = 5 with its end, 4 without: x̃ has 3 + 2·(1 + 4). Two responses and the correction of the
    wrong one, which joins: GSPO reads 3, writes and trains 2·5 and 2·8; on top |x| + 2|y| are read, |y|
    written, |x| + |y| trained."""
    made, plainly = [group(RIGHT, NEAR)], [group(RIGHT, NEAR)]
    with_correction = tokens_spent(made, Loop(fix_last).credit(made, joining()))
    gspo = tokens_spent(plainly, Loop(fix_last).credit(plainly, algorithm(**GSPO)))
    assert gspo == 3 + 2 * 5 + 2 * 8
    assert with_correction - gspo == (3 + 2 * 5) + 5 + (3 + 5)


# -------------------------------------------------------------------------------------- what tokens lose


def two_tokens(p_first, p_second, **given):
    """A sequence of two response tokens with these probabilities, of a vocabulary of two."""
    logits = torch.tensor(
        [[math.log(p), math.log(1 - p)] for p in (p_first, p_second)], dtype=torch.float64, requires_grad=True
    )
    loss, stats = loss_of_logits(
        logits_NV=logits,
        targets_N=torch.zeros(2, dtype=torch.int64),
        response_mask_N=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        sequence_weights_S=torch.tensor([0.5], dtype=torch.float64),
        off_policy_S=torch.tensor([True]),
        **given,
    )
    loss.backward()
    return loss.item(), logits.grad[:, 0].tolist(), stats


@pytest.mark.parametrize("variant", ["gspo", "gspo-token", "grpo", "gmpo", "cispo"])
def test_the_shaped_surrogate_by_hand(variant):
    """Probabilities .1 and .4, A = 2, weight ½: f = .1/.2 and .4/.5, so the loss is -½·2·(.5 + .8)/2 = -.65.
    Its derivative by log p is -½·2/2·γp/(p + γ)² = -½·.25 and -½·.16, by the logit that times 1 - p."""
    given = {"aggregation": "sequence-mean"} | ({"params": {"eps_high": 0.2}} if variant != "gmpo" else {})
    loss, slopes, stats = two_tokens(
        0.1, 0.4, variant=variant, advantages=torch.tensor([2.0], dtype=torch.float64), **given
    )
    assert loss == pytest.approx(-0.65)
    assert slopes == pytest.approx([-0.125 * 0.9, -0.08 * 0.6])
    assert not stats.clipped.any()


def test_token_weights_scale_the_gradient_and_an_advantage_of_0_loses_nothing():
    advantages = torch.tensor([2.0], dtype=torch.float64)
    halved = torch.tensor([0.5, 0.0], dtype=torch.float64)
    loss, slopes, _ = two_tokens(0.1, 0.4, advantages=advantages, token_weights_N=halved)
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.0625 * 0.9, 0.0]))
    loss, slopes, _ = two_tokens(0.1, 0.4, advantages=torch.zeros(1, dtype=torch.float64))
    assert (loss, slopes) == (0.0, [0.0, 0.0])


def test_a_shift_against_the_sampling_policy_does_not_clip_it():
    """Old log-probs far off: the variant's ratio would be clipped, the shaped surrogate has none."""
    old = torch.tensor([-9.0, -9.0], dtype=torch.float64)
    advantages = torch.tensor([2.0], dtype=torch.float64)
    loss, slopes, _ = two_tokens(0.1, 0.4, advantages=advantages, old_logprobs_N=old)
    assert (loss, slopes) == (pytest.approx(-0.65), pytest.approx([-0.1125, -0.048]))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_sequences_of_both_kinds_lose_what_each_loses_alone(variant):
    batch = batch_of((3, 6, 2, 4))
    batch["advantages"][1] = 0.7
    kinds = torch.tensor([False, True, False, True])
    settings = {"variant": variant, "aggregation": 5.0}

    def loss_of(chosen, off_policy):
        weights = torch.where(chosen, batch["sequence_weights_S"], 0.0)
        return of_logits(batch | {"sequence_weights_S": weights}, off_policy_S=off_policy, **settings)[0]

    everything = torch.ones(4, dtype=torch.bool)
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


def test_importance_corrections_leave_off_policy_sequences_alone():
    """Their engine's log-probs are of another prompt. Ratios 5 and 5 would be cut to 2."""
    arrays = replace(packed([5.0, 5.0], [5.0, 5.0]), off_policy_S=np.array([False, True]))
    corrected, found = correct(arrays, LossConfig(use_tis=True, tis_clip=2.0))
    assert corrected.token_weights_R.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert [own.weight for own in found] == [4.0, 2.0]


def test_rows_that_are_compared_with_the_engine_leave_them_out():
    rows = [
        sequence([7, 8], [3, 4], advantage=1.0, weight=1.0, group=0, off_policy=number == 1)
        for number in range(2)
    ]
    batch = lay_out(pack(MicroBatch((0, 1), tuple(rows))), multiple=4, device=torch.device("cpu"))
    assert batch.rows.off_policy_S.tolist() == [False, True, False]  # the last is padding
    assert batch.loss_rows().tolist() == [1, 2, 4, 5]
    assert batch.compared_rows_R.tolist() == [1, 2]
    plainly = [replace(row, off_policy=False) for row in rows]
    batch = lay_out(pack(MicroBatch((0, 1), tuple(plainly))), multiple=4, device=torch.device("cpu"))
    assert batch.rows.off_policy_S is None


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


# ----------------------------------------------------------------------------------- the check at start


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ibpo_joint": True}, "a correction is trained on once"),
        ({"ibpo_operator": AGREEMENT}, "--ibpo-operator compare-and-correct has it"),
        ({"advantages": "critic"}, "--advantages critic compares none"),
    ],
)
def test_what_cannot_be_had_with_it_is_refused(settings, says):
    check_algorithm(joining())
    with pytest.raises(ValueError, match=says):
        check_algorithm(joining(**settings))


def test_the_engines_log_probs_are_of_the_long_prompt():
    config = Config(algorithm=joining(), loss=LossConfig(old_logprobs="engine"))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    with pytest.raises(ValueError, match="use --old-logprobs recompute"):
        check_settings(config)
