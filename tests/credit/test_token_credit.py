"""Token credits weight the tokens of a response once its advantage is known (--token-credit)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit import TokenFactors
from megatron_ibpo.credit.divergence import normalised
from support.credit_cases import (
    RANDOM_WINDOW,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    fix_last,
    group,
    of_preset,
    prompt,
    response,
    some_groups,
    token_weights,
)

FREE_TOKEN_CREDITS = (
    "uniform", "wrong-weight", "wrong-weight-by-length",
    "divergence-window", "divergence-cut", RANDOM_WINDOW,
)  # fmt: skip
FREE_ESTIMATORS = ("group", "group-bessel", "group-mean", "leave-one-out", "maxrl")


def gspo(**settings):
    return algorithm("gspo", **settings)


def weights_of(made, config, **settings):
    """Token weights of the responses of one group."""
    credit = Loop(fix_last).credit([made], config, **settings)
    return token_weights(by_kind(credit, "response"))


# ---------------------------------------------------------------------------------- weight on wrong responses


def test_a_wrong_response_beside_a_right_one_counts_a_small_part():
    credit = Loop(fix_last).credit([group(RIGHT, [14], [15, 16])], gspo(token_credit="wrong-weight"))
    assert token_weights(credit.sequences) == [None, (0.075,) * 2, (0.075,) * 3]
    plain_credit = Loop(fix_last).credit([group(RIGHT, [14], [15, 16])], gspo())
    assert [s.advantage for s in credit.sequences] == [s.advantage for s in plain_credit.sequences]
    # 5 tokens count 1, and 2 + 3 count .075
    assert credit.metrics["token_weight_mean"] == pytest.approx((5 + 0.075 * 5) / 10)
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


# ------------------------------------------------------------------------------------------- divergence


def test_the_window_is_the_two_tokens_where_a_wrong_response_leaves_the_longest_shared_prefix():
    """Shared with the first right response: 10; with the second: 10 11 12. The window holds tokens 3 and 4,
    of which the last is the end."""
    made = group([10, 13], [10, 11, 12, 13], [10, 11, 12, 14])
    assert weights_of(made, gspo(token_credit="divergence-window")) == [None, None, (0, 0, 0, 1, 1)]
    one = gspo(token_credit="divergence-window", token_credit_tokens=1)
    assert weights_of(made, one) == [None, None, (0, 0, 0, 1, 0)]


def test_the_cut_is_all_from_there_on():
    made = group([10, 11, 13], [10, 14, 15, 16], [14])
    assert weights_of(made, gspo(token_credit="divergence-cut")) == [None, (0, 1, 1, 1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("wrong", "cut", "window"),
    [
        (response([10, 11], 0.0), (0, 0, 1), (0, 0, 1)),  # it stops where it should have gone on
        (response(RIGHT[:2], 0.0, finish_reason="length"), (0, 0), (0, 0)),  # it was cut off
        (response([10, 11, 12, 13, 14], 0.0), (0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1)),  # it goes on too long
        (response([14] * 4, 0.0), (1, 1, 1, 1, 1), (1, 1, 0, 0, 0)),  # nothing is shared
    ],
)
def test_where_a_response_stops_too_early_or_too_late(wrong, cut, window):
    made = Group(prompt(), [*group(RIGHT).responses, wrong])
    for name, expected in (("divergence-cut", cut), ("divergence-window", window)):
        credit = Loop(fix_last).credit([made], gspo(token_credit=name))
        assert token_weights(credit.sequences) == [None, expected]
        assert credit.metrics["weightless_responses"] == float(not any(expected))


def test_a_window_counts_tokens_that_the_policy_wrote():
    wrong = response([10, 14, 50, 51, 15], 0.0, written=[True, True, False, False, True])
    made = Group(prompt(), [*group(RIGHT).responses, wrong])
    (_, weights) = weights_of(made, gspo(token_credit="divergence-window"))
    assert np.array(weights)[wrong.loss_mask].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("name", ["divergence-window", "divergence-cut", RANDOM_WINDOW])
def test_responses_without_a_right_sibling_or_that_are_made_likelier_learn_as_a_whole(name):
    """One group has no right response. In the other IBPO's bonus lifts a wrong one above the mean: rewards
    1 .3 0 0 0 0, mean .22."""
    made = Group(prompt(), [response([14], 0.4), response([15], 0.0)])
    assert weights_of(made, gspo(token_credit=name)) == [None, None]
    near, far = [10, 11, 12, 14], [20, 21, 22]
    lifted = group(RIGHT, near, far, far, far, far)
    credit = Loop(lambda x: RIGHT if candidates(x)[0] == near else far).credit(
        [lifted], algorithm(token_credit=name)
    )
    of_responses = by_kind(credit, "response")
    assert of_responses[1].advantage > 0 > of_responses[2].advantage
    weights = token_weights(of_responses)
    assert weights[:2] == [None, None]
    assert all(sum(w) < 4 or name == "divergence-cut" for w in weights[2:])
    assert None not in weights[2:]


answers = st.lists(st.lists(st.integers(10, 13), min_size=1, max_size=6), min_size=2, max_size=5)


@given(answers)
def test_the_cut_leaves_what_no_right_response_begins_with(contents):
    """It is compared with a definition by sets of prefixes: token t is shared if some right response has all
    tokens up to it."""
    made = group(*contents)
    shared = {
        tuple(r.token_ids[:n]) for r in made.responses if r.correct for n in range(1, len(r.token_ids) + 1)
    }
    credit = Loop(fix_last).credit([made], gspo(token_credit="divergence-cut"))
    for sequence, sample in zip(credit.sequences, made.responses, strict=True):
        if sample.correct or not shared:
            assert sequence.token_weights is None
            continue
        expected = [
            float(tuple(sample.token_ids[: t + 1]) not in shared) for t in range(len(sample.token_ids))
        ]
        assert sequence.token_weights.tolist() == expected


def words(ids):
    """One word or sign a token."""
    return [WORDS[token] for token in ids]


WORDS = {
    10: "We ", 11: "add", 12: " 1,000", 13: "\n", 14: " 1000.0",
    15: "  ", 16: "So", 17: " 7", 18: ".", 19: " 8",
}  # fmt: skip


def test_by_steps_white_space_and_the_spelling_of_numbers_do_not_count():
    """Right: "We add 1,000" | "So 7." Wrong: "We   add 1000.0" | "So 8." They part at the second step."""
    right = response([10, 11, 12, 13, 16, 17, 18], 1.0)
    wrong = response([10, 15, 11, 14, 13, 16, 19, 18], 0.0)
    made = Group(prompt(), [right, wrong])
    texts = {"token_texts": words}
    for name, expected in (
        ("divergence-window", (0, 0, 0, 0, 0, 1, 1, 1, 0)),
        ("divergence-cut", (0, 0, 0, 0, 0, 1, 1, 1, 1)),
    ):
        config = gspo(token_credit=name, token_credit_unit="step")
        assert weights_of(made, config, vocabulary=texts) == [None, expected]
    by_tokens = gspo(token_credit="divergence-cut")
    assert weights_of(made, by_tokens) == [None, (0, *[1] * 8)], "another token of the same meaning"


def test_by_steps_one_that_ends_after_shared_steps_learns_from_its_end():
    right = response([10, 11, 12, 13, 16, 17, 18], 1.0)
    made = Group(prompt(), [right, response([10, 11, 14, 13], 0.0)])
    config = gspo(token_credit="divergence-window", token_credit_unit="step")
    assert weights_of(made, config, vocabulary={"token_texts": words}) == [None, (0, 0, 0, 0, 1)]
    made = Group(prompt(), [right, response([10, 11, 14, 13], 0.0, finish_reason="length")])
    assert weights_of(made, config, vocabulary={"token_texts": words}) == [None, (0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("6+1 = 7", "6 + 1=7", True),
        ("1,234.50", "1234.5", True),
        ("007", "7", True),
        ("0.0", "0", True),
        ("add 1 2", "add 12", False),
        ("1, 200", "1,200", False),
        ("10", "100", False),
        ("x = 2.5", "x = 25", False),
    ],
)
def test_what_counts_as_the_same_step(one, other, alike):
    assert (normalised(one) == normalised(other)) is alike


def test_steps_need_the_texts_of_tokens():
    with pytest.raises(ValueError, match="texts of tokens"):
        weights_of(group(RIGHT, [14]), gspo(token_credit="divergence-cut", token_credit_unit="step"))


# ------------------------------------------------------------------------------------------- the control


def test_the_random_window_is_two_neighbours_anywhere_and_comes_out_again():
    """Over 600 draws each of the three places of a response of 3 tokens and its end comes up about as often:
    200, with a standard deviation of 11.5."""
    config, places = gspo(token_credit=RANDOM_WINDOW), {}
    for step in range(600):
        made = group(RIGHT, [14, 15, 16])
        (_, drawn) = weights_of(made, config, step=step)
        assert weights_of(made, config, step=step) == [None, drawn]
        places[drawn] = places.get(drawn, 0) + 1
    assert places.keys() == {(1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 1, 1)}
    assert all(abs(count - 200) < 60 for count in places.values())


def test_a_random_window_lies_in_what_the_policy_wrote_and_may_be_all_of_it():
    config = gspo(token_credit=RANDOM_WINDOW)
    with_tool = response([50, 51, 14], 0.0, written=[False, False, True])
    made = Group(prompt(), [*group(RIGHT, [14]).responses, with_tool])
    assert weights_of(made, config) == [None, (1, 1), (0, 0, 1, 1)]
    short = response([14], 0.0, finish_reason="length")
    assert weights_of(Group(prompt(), [*group(RIGHT).responses, short]), config) == [None, (1,)]


# ------------------------------------------------------------------------------------------- composition


def test_a_token_credit_multiplies_the_operators_weights_and_leaves_corrections_alone():
    """The mask of ibpo-mask is 0 0 0 1 0; a wrong response counts .15."""
    made = group(RIGHT, [10, 11, 12, 14])
    config = algorithm(ibpo_variant="mask", token_credit="wrong-weight")
    credit = Loop(fix_last).credit([made], config)
    assert token_weights(by_kind(credit, "response")) == [None, (0.0, 0.0, 0.0, 0.075, 0.0)]
    assert token_weights(by_kind(credit, "correction")) == [None]


@pytest.mark.parametrize(
    "settings",
    [
        *({"token_credit": name} for name in FREE_TOKEN_CREDITS),
        *({"advantages": name} for name in FREE_ESTIMATORS),
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_the_price_is_that_of_gspo_to_the_token(settings):
    """1.00: as many tokens trained on, and nothing asked of engine, policy or critic."""
    loop, groups = Loop(fix_last), some_groups()
    credit, plain = (loop.credit(groups, gspo(**own)) for own in (settings, {}))
    assert loop.requests == []
    assert [s.num_tokens for s in credit.sequences] == [s.num_tokens for s in plain.sequences]
    assert sum(s.num_tokens for s in plain.sequences) > 100


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
        (
            {"token_credit": "divergence-cut", "ibpo_variant": "mask"},
            "--token-credit divergence-cut and --ibpo-variant mask both choose",
        ),
        (
            of_preset("ciw") | {"token_credit": RANDOM_WINDOW},
            f"--token-credit {RANDOM_WINDOW} and --ibpo-operator span-masking both choose",
        ),
        (
            {"token_credit": RANDOM_WINDOW, "token_credit_unit": "step"},
            f"--token-credit-unit: ibpo with --token-credit {RANDOM_WINDOW} has no such parameter; "
            "--token-credit divergence-window or divergence-cut has it",
        ),
        ({"token_credit": "wrong-weight", "token_credit_weight": -1.0}, "--token-credit-weight: must be"),
        ({"token_credit": "wrong-weight-by-length", "token_credit_tokens": 0}, "--token-credit-tokens: must"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(settings, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"token_credit": "wrong-weight", "ibpo_variant": "mask"},
        {"token_credit": "divergence-window", "ibpo_variant": "ratio"},
        of_preset("dapo") | {"token_credit": "divergence-window", "token_credit_unit": "step"},
        of_preset("ciw") | {"token_credit": "wrong-weight-by-length"},
        {"token_credit": f"{__name__}:too_short", "ibpo_variant": "mask"},
    ],
)
def test_what_goes_together_is_not_refused(settings):
    check_algorithm(algorithm(**settings))


def test_an_unknown_token_credit_is_named():
    with pytest.raises(ValueError, match="--token-credit wrong: unknown token credit; there are uniform"):
        Loop(fix_last).credit([group(RIGHT, [14])], gspo(token_credit="wrong"))
