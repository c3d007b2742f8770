"""Which tokens of a response learn how much, once its advantage is known (--token-credit)."""

from __future__ import annotations

import numpy as np
import pytest
from credit_cases import (
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    check_algorithm,
    fix_last,
    group,
    of_preset,
    prompt,
    response,
    token_weights,
)

from megatron_ibpo.config import AlgorithmConfig
from megatron_ibpo.credit import TokenFactors
from megatron_ibpo.records import Group


def gspo(**settings):
    return AlgorithmConfig(**of_preset("gspo") | settings)


def ibpo(**settings):
    return algorithm(**settings)


def weights_of(made, config, **settings):
    """Token weights of the responses of one group."""
    credit = Loop(fix_last).credit([made], config, **settings)
    return token_weights(by_kind(credit, "response"))


# ---------------------------------------------------------------------------------- weight on wrong responses


def test_a_wrong_response_beside_a_right_one_counts_fifteen_hundredths():
    credit = Loop(fix_last).credit([group(RIGHT, [14], [15, 16])], gspo(token_credit="wrong-weight"))
    assert token_weights(credit.sequences) == [None, (0.15,) * 2, (0.15,) * 3]
    plain_credit = Loop(fix_last).credit([group(RIGHT, [14], [15, 16])], gspo())
    assert [s.advantage for s in credit.sequences] == [s.advantage for s in plain_credit.sequences]
    # 5 tokens count 1, and 2 + 3 count .15
    assert credit.metrics["token_weight_mean"] == pytest.approx((5 + 0.15 * 5) / 10)
    assert credit.metrics["weightless_responses"] == 0
    assert "token_weight_mean" not in plain_credit.metrics


def test_by_length_a_wrong_response_counts_as_two_of_its_tokens():
    """n trained tokens with 2/n each; one token cannot count as two. Tool output is no trained token."""
    with_tool = response([50, 51, 14], 0.0, written=[False, False, True])
    made = Group(prompt(), [*group(RIGHT, [14, 15, 16]).responses, with_tool])
    config = gspo(token_credit="wrong-weight-by-length")
    assert weights_of(made, config) == [None, (0.5,) * 4, (1.0,) * 4]
    cut_off = response([14], 0.0, finish_reason="length")
    made = Group(prompt(), [*group(RIGHT).responses, cut_off])
    assert weights_of(made, config) == [None, (1.0,)]


@pytest.mark.parametrize("name", ["wrong-weight", "wrong-weight-by-length"])
def test_without_a_right_response_wrong_ones_count_whole(name):
    """A graded reward makes the group informative, and none is correct; one has no score at all."""
    made = Group(prompt(), [response([14], 0.4), response([15], 0.0), response([13], None)])
    assert weights_of(made, gspo(token_credit=name)) == [None, None]


def test_a_weight_of_one_changes_no_gradient_and_zero_leaves_none():
    made = [group(RIGHT, [14])]
    whole = Loop(fix_last).credit(made, gspo(token_credit="wrong-weight", token_credit_weight=1.0))
    assert token_weights(whole.sequences) == [None, (1.0, 1.0)]
    none = Loop(fix_last).credit(made, gspo(token_credit="wrong-weight", token_credit_weight=0.0))
    assert token_weights(none.sequences) == [None, (0.0, 0.0)]
    assert none.metrics["weightless_responses"] == 1


# ------------------------------------------------------------------------------------------- composition


def test_a_token_credit_multiplies_the_operators_weights_and_leaves_corrections_alone():
    """The mask of ibpo-mask is 0 0 0 1 0; a wrong response counts .15."""
    made = group(RIGHT, [10, 11, 12, 14])
    config = ibpo(ibpo_variant="mask", token_credit="wrong-weight")
    credit = Loop(fix_last).credit([made], config)
    assert token_weights(by_kind(credit, "response")) == [None, (0.0, 0.0, 0.0, 0.15, 0.0)]
    assert token_weights(by_kind(credit, "correction")) == [None]


def first_token_only(groups, advantages, context):
    """A token credit of one's own: of responses below their group's mean the first token."""
    found = [
        [
            None if advantage is None or advantage >= 0 else np.eye(1, len(response.token_ids))[0]
            for response, advantage in zip(group.responses, of_group, strict=True)
        ]
        for group, of_group in zip(groups, advantages, strict=True)
    ]
    return TokenFactors(found, {"groups_seen": float(len(groups))})


def too_short(groups, advantages, context):
    return TokenFactors([[np.ones(1)] * len(group.responses) for group in groups])


def test_a_token_credit_of_ones_own_sees_all_groups_and_their_advantages():
    config = gspo(token_credit=f"{__name__}:first_token_only")
    groups = [group(RIGHT, [14]), group([14], [15])]
    credit = Loop(fix_last).credit(groups, config)
    assert token_weights(credit.sequences) == [None, (1.0, 0.0), None, None]
    assert credit.metrics["groups_seen"] == 2
    assert credit.sequences[1].advantage == pytest.approx(-1, abs=1e-7)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"shape \(1,\) for a response of 5 tokens"):
        Loop(fix_last).credit([group(RIGHT, [14])], gspo(token_credit=f"{__name__}:too_short"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            of_preset("ppo") | {"token_credit": "wrong-weight"},
            "--token-credit wrong-weight compares the responses of a group, and --advantages critic",
        ),
        ({"token_credit": "wrong-weight", "token_credit_weight": -1.0}, "--token-credit-weight: must be"),
        ({"token_credit": "wrong-weight-by-length", "token_credit_tokens": 0}, "--token-credit-tokens: must"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(settings, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))


def test_an_unknown_token_credit_is_named():
    with pytest.raises(ValueError, match="--token-credit wrong: unknown token credit; there are uniform"):
        Loop(fix_last).credit([group(RIGHT, [14])], gspo(token_credit="wrong"))
