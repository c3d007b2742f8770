"""Gated corrections: what is asked, by the prices of the run's meter and by how corrections went before."""

from pathlib import Path

import pytest
from gated import success_rate

from megatron_ibpo.config import Config
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.run.checks import check_settings
from megatron_ibpo.run.cost import CostMeter
from support.credit_cases import (
    GATED,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    fix_last,
    group,
    some_groups,
)
from support.paths import ROOT

WRONG = [10, 11, 12, 14]


def by_token(prompt, response, *, sharing, trained):
    """Prices where a token costs 1 to read, 1 to write and 3 to train on."""
    return prompt / sharing + response + 3 * trained


def gated(groups, memory=None, correct=fix_last, **settings):
    """(the corrections' prompts, the credit)"""
    loop = Loop(correct)
    credit = loop.credit(
        groups,
        algorithm(ibpo_operator=GATED, **settings),
        price=by_token,
        memory={} if memory is None else memory,
    )
    return loop.asked, credit


def test_where_nothing_is_correct_everything_wrong_is_corrected_whatever_it_costs():
    asked, credit = gated([group(WRONG, WRONG)], memory={"0/2": [0, 1000]})
    assert len(asked) == 2
    assert credit.metrics["gated_pairs"] == 0


def test_the_gate_opens_where_a_correction_beats_as_many_rollouts_as_it_costs():
    """By hand: x has 3 tokens, a response 5 with its end, x̃ 3 + 5 + 5 = 13. A rollout costs 3/4 + 5 + 3·8 =
    29.75, a correction 13 + 5 + 3·18 = 72: κ = 2.4202. With 1 of 4 correct p̂ = .25, and the gate opens
    where q̂ = (s + 1)/(n + 2) exceeds .60504."""
    of_one = [group(RIGHT, WRONG, WRONG, WRONG)]
    for memory, opens in (
        ({}, False),  # ½
        ({"1/4": [20, 31]}, True),  # 21/33 = .636
        ({"1/4": [19, 31]}, True),  # 20/33 = .60606
        ({"1/4": [19, 31.1]}, False),  # 20/33.1 = .60423
        ({"2/4": [20, 20]}, False),  # another composition
    ):
        asked, credit = gated(of_one, memory)
        assert len(asked) == (3 if opens else 0), memory
        assert credit.metrics["gated_pairs"] == (0 if opens else 3)


def test_what_is_not_trained_on_costs_less_and_several_corrections_read_their_prompt_once():
    """Shaping only: 13 + 5 = 18 against 29.75, κp̂ = .1513 < ½. Two of four correct and two corrections each
    that are trained on: (6.5 + 5 + 54)/29.75·½ = 1.10 > 1, never worth it."""
    assert len(gated([group(RIGHT, WRONG, WRONG, WRONG)], ibpo_joint=False)[0]) == 3
    surely = {"2/4": [1e6, 1e6]}
    assert gated([group(RIGHT, RIGHT, WRONG, WRONG)], surely, ibpo_corrections=2)[0] == []
    assert len(gated([group(RIGHT, RIGHT, WRONG, WRONG)], surely, ibpo_joint=False)[0]) == 2


def test_what_came_of_corrections_is_remembered_by_composition_and_fades():
    """Of two groups without a correct one, three of four corrections succeed; nothing else is asked."""
    near, far = WRONG, [10, 11, 15]
    _, credit = gated(
        [group(near, near, index=0), group(near, far, index=1), group(RIGHT, RIGHT, RIGHT, WRONG, index=2)],
        memory={"0/2": [4, 20], "3/4": [1, 2], "2/4": [0.0, 0.0104]},
        correct=lambda x: fix_last(x) if candidates(x)[0] == near else far,
    )
    assert credit.memory == {"0/2": [0.95 * 4 + 3, 0.95 * 20 + 4], "3/4": [0.95, 1.9]}
    assert success_rate(credit.memory, 0, 2) == pytest.approx(7.8 / 25)
    assert success_rate(credit.memory, 1, 2) == 0.5


def test_a_run_without_the_gate_remembers_nothing():
    assert Loop(fix_last).credit(some_groups(), algorithm()).memory == {}


def test_a_memory_that_is_none_is_refused():
    with pytest.raises(ValueError, match="groups with 1/2 right is no pair of counts"):
        gated([group(RIGHT, WRONG)], {"1/2": ["a", 1]})


def test_the_meters_price_of_a_sample_is_what_it_adds_up_for_one():
    """A prompt of 13 tokens, an answer of 5, an update over both; then four answers to one prompt of 3."""
    shape = read_hf_config(ROOT / "examples/tiny_qwen3")
    made = group(WRONG, WRONG)
    corrected = by_kind(Loop(fix_last).credit([made], algorithm()), "correction")[0]
    once = CostMeter(shape, 1)
    once.sampling([made.corrections[0].response])
    once.training([], [corrected.num_tokens])
    assert once.spent.tokens == 13 + 5 + 18
    assert once.of_sample(13, 5, trained=18) == pytest.approx(once.spent.flops, rel=1e-12)
    four = CostMeter(shape, 1)
    four.sampling(group(WRONG, RIGHT, WRONG, WRONG).responses)
    assert 4 * four.of_sample(3, 5, sharing=4) == pytest.approx(four.spent.flops, rel=1e-12)


def test_a_gate_needs_corrections_to_hold_back():
    check_algorithm(algorithm(ibpo_operator=GATED))
    with pytest.raises(ValueError, match=r"--ibpo-corrections: must be .*is 0"):
        check_algorithm(algorithm(ibpo_operator=GATED, ibpo_corrections=0))


def test_sampling_ahead_knows_no_corrections_of_the_steps_before():
    config = Config(algorithm=algorithm(ibpo_operator=GATED))
    config.model.hf_checkpoint, config.run.dry_run = Path(), True
    config.rollout.max_staleness = 1
    with pytest.raises(
        ValueError, match="--ibpo-operator Gated: goes by the corrections of the steps before"
    ):
        check_settings(config)


def test_asking_depends_on_the_group_alone():
    """So that a journal replays it: the same prompts and seeds, whatever other groups there are."""
    together, _ = gated(some_groups(), {"1/4": [30, 31]})
    apart = [x for g in some_groups() for x in gated([g], {"1/4": [30, 31]})[0]]
    assert together == apart
