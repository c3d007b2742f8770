"""The paper's variants by hand: ratio, mask, several corrections, joint training, the penalty on rewrites."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import PRESETS
from megatron_ibpo.credit.compared_parts import ThinkingMarks, compared_pairs, part_in_prompt
from megatron_ibpo.credit.edits import find_edits, gradient_mask
from megatron_ibpo.credit.estimators import group_z_score
from megatron_ibpo.edit_distance import opcodes
from support.credit_cases import (
    AGREEMENT,
    RIGHT,
    Loop,
    algorithm,
    by_kind,
    candidates,
    check_algorithm,
    correction,
    fix_last,
    group,
    ids_of,
    in_turn,
    of_preset,
    plain,
    prompt,
    response,
    some_groups,
    token_weights,
)

THINK, END_THINK = 80, 81
MARKS = ThinkingMarks((THINK,), (END_THINK,))


# ------------------------------------------------------------------------------------------ ratio, mask


def test_ratio_gives_the_share_of_tokens_kept():
    """ŷ keeps three of y's four tokens: Δ = 3/4, r' = .45; mask and β play no part."""
    credit = Loop(fix_last).credit([group(RIGHT, [10, 11, 12, 14])], algorithm("ibpo-ratio"))
    right, wrong = by_kind(credit, "response")
    assert [right.advantage, wrong.advantage] == group_z_score([1.0, 0.6 * 0.75])
    assert wrong.token_weights is None
    assert credit.metrics["shaped_reward"] == pytest.approx(1.45 / 2)


def test_mask_lets_the_gradient_through_changed_tokens_only():
    """ŷ replaces y's last token and ends as y does; Δ is β as in the base variant."""
    wrong = [10, 11, 12, 14]
    masked = Loop(fix_last).credit([group(RIGHT, wrong)], algorithm("ibpo-mask"))
    base = Loop(fix_last).credit([group(RIGHT, wrong)], algorithm("ibpo"))
    assert token_weights(by_kind(masked, "response")) == [None, (0.0, 0.0, 0.0, 1.0, 0.0)]
    assert token_weights(by_kind(masked, "correction")) == [None]
    assert [s.advantage for s in masked.sequences] == [s.advantage for s in base.sequences]
    assert masked.metrics["empty_masks"] == 0


@pytest.mark.parametrize(
    ("corrected", "why"),
    [
        ([10, 11, 12, 15], "wrong"),
        ([30, 31, 32, 33, 34, 13], "rewritten: d = 1 > .6, and .83 to the reference"),
    ],
)
def test_a_correction_that_does_not_count_masks_nothing(corrected, why):
    made = group([20, 21, 22, 23, 24, 13], [10, 11, 12, 14])
    credit = Loop(lambda x: corrected).credit([made], algorithm("ibpo-mask"))
    assert token_weights(by_kind(credit, "response")) == [None, None], why
    assert credit.metrics["bonus_rate"] == 0


def test_of_several_corrections_the_bonus_is_the_mean_and_the_mask_the_union():
    """Of four corrections two count: they change tokens 1 and 3. Δ = .5·2/4."""
    wrong = [10, 11, 12, 14]
    answers = in_turn([10, 19, 12, 14, 13], [10, 11, 12, 13], [10, 11, 12, 15], [40, 41, 42, 43, 44, 13])
    made = group(RIGHT, wrong)
    credit = Loop(answers).credit([made], algorithm("ibpo-mask", ibpo_corrections=4))
    assert [c.response.correct for c in made.corrections] == [True, True, False, True]
    assert [c.rewritten for c in made.corrections] == [False, False, False, True]
    right, masked = by_kind(credit, "response")
    assert ids_of(masked.token_weights) == (0.0, 1.0, 0.0, 1.0, 0.0)
    assert [right.advantage, masked.advantage] == group_z_score([1.0, 0.6 * 0.25])


@pytest.mark.parametrize(
    ("y", "y_hat", "mask", "with_insertions"),
    [
        ([10, 12], [10, 12, 13], (0, 0, 0), (0, 1, 0)),  # at the end
        ([10, 12], [10, 20, 12, 13], (0, 0, 0), (1, 1, 0)),  # in the middle too
        ([10, 12], [20, 10, 12, 13], (0, 0, 0), (0, 1, 0)),  # before the first token there is none
        ([10, 12, 15], [10, 13], (0, 1, 1, 0), (0, 1, 1, 0)),  # nothing is inserted
    ],
)
def test_a_correction_that_only_inserts_leaves_no_gradient_unless_asked(y, y_hat, mask, with_insertions):
    for option, expected in ((False, mask), (True, with_insertions)):
        config = algorithm("ibpo-mask", ibpo_mask_insertions=option, ibpo_rewrite_threshold=1.0)
        credit = Loop(lambda x: y_hat).credit([group(RIGHT, y)], config)
        assert ids_of(by_kind(credit, "response")[1].token_weights) == expected
        assert credit.metrics["empty_masks"] == float(not any(expected))


def test_the_end_is_changed_where_the_correction_has_none():
    """y ends, ŷ was cut off: the end-of-sequence id is no common token. The other way round y has none."""
    ended, cut_off = response([10, 14], 0.0), response([10, 14], 0.0, finish_reason="length")
    made = Group(prompt(), [ended, cut_off])
    made.corrections = [
        correction(0, response([10, 13], 1.0, finish_reason="length")),
        correction(1, response([10, 13], 1.0)),
    ]
    edits, _ = find_edits(compared_pairs([made], None), mark_insertions=False)
    assert [flags.tolist() for flags in edits] == [[False, True, True], [False, True]]


# ------------------------------------------------------------------------------------------------- λ


@pytest.mark.parametrize("estimator", ["group", "group-bessel", "maxrl"])
def test_lambda_cancels_where_no_response_is_correct(estimator):
    """r' = λβ or 0 there, and the spread of the group divides λ out: at any λ the corrected one of four has
    advantage √3 (Bessel: 3/2, MaxRL: 3). Beside a correct response λ counts."""
    wrong, with_right = [[10, 11, 12, 14], [20, 21], [22, 23], [24, 25]], [[10, 11, 12, 14], [20, 21], RIGHT]

    def advantage(contents, weight):
        config = algorithm("ibpo", ibpo_lambda=weight, advantages=estimator)
        credit = Loop(one_is_corrected).credit([group(*contents)], config)
        return by_kind(credit, "response")[0].advantage

    expected = {"group": math.sqrt(3), "group-bessel": 1.5, "maxrl": 3.0}[estimator]
    for weight in (0.01, 0.3, 0.6, 1.9):
        assert advantage(wrong, weight) == pytest.approx(expected, rel=1e-5)
    assert advantage(wrong, 0.0) == 0
    assert advantage(with_right, 0.3) < advantage(with_right, 0.6) < advantage(with_right, 1.9)


def test_without_the_spread_lambda_counts_everywhere():
    """Dr. GRPO's estimator: A = λβ·3/4."""
    made = group([10, 11, 12, 14], [20, 21], [22, 23], [24, 25])
    config = algorithm("ibpo", ibpo_lambda=0.4, advantages="group-mean")
    assert Loop(one_is_corrected).credit([made], config).sequences[0].advantage == pytest.approx(0.15)


# --------------------------------------------------------------------------------------------- signed mask


def one_is_corrected(prompt_ids):
    """10 11 12 14 becomes 10 11 12 13; whatever else is shown becomes wrong."""
    return RIGHT if candidates(prompt_ids)[0] == [10, 11, 12, 14] else [20, 21]


@pytest.mark.parametrize(
    ("variant", "learns"), [("mask", (0.0, 0.0, 0.0, 1.0, 0.0)), ("signed-mask", (1.0, 1.0, 1.0, 0.0, 1.0))]
)
def test_in_a_wrong_group_the_mask_raises_the_wrong_token_and_the_signed_mask_the_others(variant, learns):
    """All four are wrong and one is corrected: r' = .3 0 0 0, A = √3 for it. Eq. 17 then makes its wrong
    token likelier, and nothing else of it."""
    made = group([10, 11, 12, 14], [20, 21], [22, 23], [24, 25])
    credit = Loop(one_is_corrected).credit([made], algorithm("ibpo-mask", ibpo_variant=variant))
    near, *others = by_kind(credit, "response")
    assert near.advantage == pytest.approx(math.sqrt(3), abs=1e-6)
    assert ids_of(near.token_weights) == learns
    assert token_weights(others) == [None] * 3


def test_where_it_is_made_less_likely_a_signed_mask_is_the_mask():
    made = group(RIGHT, [10, 11, 12, 14])
    credit = Loop(fix_last).credit([made], algorithm("ibpo-mask", ibpo_variant="signed-mask"))
    right, near = by_kind(credit, "response")
    assert near.advantage < 0
    assert token_weights([right, near]) == [None, (0.0, 0.0, 0.0, 1.0, 0.0)]


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_a_signed_mask_is_the_mask_or_the_rest_by_the_sign_of_the_advantage(seed):
    masked, signed = (
        Loop(fix_last).credit(some_groups(seed), algorithm("ibpo-mask", ibpo_variant=variant))
        for variant in ("mask", "signed-mask")
    )
    for one, other in zip(masked.sequences, signed.sequences, strict=True):
        assert one.advantage == other.advantage
        mask = ids_of(one.token_weights)
        if mask is not None and one.advantage > 0:
            mask = tuple(1 - m for m in mask)
        assert ids_of(other.token_weights) == mask


def test_agreement_has_a_signed_mask_too():
    """One step of three agrees: r' = 1 .2 0 0 0 0 0 0, whose mean is .15."""
    near, far = sums(2, 4, answer=4), sums(5, 6, answer=6)
    made = group(sums(2, 3, answer=3), near, *[far] * 6)
    settings = {"vocabulary": {"token_texts": texts_of}}
    masked, signed = (
        by_kind(Loop(fix_last).credit([made], agreement(ibpo_variant=variant), **settings), "response")[1]
        for variant in ("mask", "signed-mask")
    )
    assert masked.advantage == signed.advantage > 0
    assert (masked.token_weights + signed.token_weights).tolist() == [1.0] * len(masked.token_weights)
    assert 0 < masked.token_weights.sum() < len(masked.token_weights)


tokens = st.lists(st.integers(1, 4), max_size=12)


@given(tokens, tokens)
def test_edits_are_those_of_the_edit_script(y, y_hat):
    """Changed are the tokens replaced or left out; with insertions also the one before each insertion."""
    made = Group(prompt(), [response(y, 0.0)])
    made.corrections = [correction(0, response(y_hat, 1.0))]
    script = opcodes(y, y_hat)
    changed = {
        i for step in script if step.tag in ("replace", "delete") for i in range(step.a_start, step.a_end)
    }
    before = {step.a_start - 1 for step in script if step.tag == "insert"} - {-1}
    for option, expected in ((False, changed), (True, changed | before)):
        (flags,), _ = find_edits(compared_pairs([made], None), mark_insertions=option)
        assert set(np.flatnonzero(flags).tolist()) == expected
        assert made.corrections[0].unmodified_share == pytest.approx(
            1 - len(changed) / max(len(y), 1) if y else 0
        )
    mask = gradient_mask([flags])
    assert len(mask) == len(y) + 1


# ------------------------------------------------------------------------------- shaping only, joint only


def test_shaping_only_trains_on_no_correction():
    shaping = Loop(fix_last).credit(some_groups(), algorithm("ibpo-shaping-only"))
    joint = Loop(fix_last).credit(some_groups(), algorithm("ibpo"))
    assert plain(shaping.sequences) == plain(by_kind(joint, "response"))
    assert shaping.metrics["corrections"] > 0


def test_joint_only_has_the_responses_of_gspo_and_the_corrections_of_ibpo():
    joint = Loop(fix_last).credit(some_groups(), algorithm("ibpo-joint-only"))
    gspo, ibpo = (Loop(fix_last).credit(some_groups(), algorithm(name)) for name in ("gspo", "ibpo"))
    assert plain(by_kind(joint, "response")) == plain(gspo.sequences)
    assert plain(by_kind(joint, "correction")) == plain(by_kind(ibpo, "correction"))


def test_cipo_shows_the_wrong_answer_alone_and_trains_on_its_correction():
    """Rewards 1 0 0 0; of three corrections the first two are right."""
    answers = in_turn([13], [20, 13], [21])
    loop = Loop(answers)
    credit = loop.credit([group(RIGHT, [14], [15], [16])], algorithm("cipo"))
    assert [candidates(asked) for asked in loop.asked] == [[[14]], [[15]], [[16]]]
    third = 3**-0.5
    assert [s.advantage for s in by_kind(credit, "response")] == pytest.approx(
        [3**0.5, -third, -third, -third], abs=1e-7
    )
    assert [s.advantage for s in by_kind(credit, "correction")] == pytest.approx(
        [2**-0.5, 2**-0.5, -(2**0.5)], abs=1e-7
    )


def test_grpo_differs_from_gspo_in_the_loss_alone():
    assert replace(algorithm("grpo"), advantage_estimator="gspo") == algorithm("gspo")


# --------------------------------------------------------------------- groups of corrections, the penalty


def test_corrections_are_compared_within_their_pair_or_their_prompt():
    """Two corrections of each of two wrong responses, rewards 1 0 and 1 1."""
    answers = ([10, 13], [10, 15], [11, 13], [11, 12, 13])
    made = [group(RIGHT, [10, 14], [11, 14])]
    per_pair = Loop(in_turn(*answers)).credit(
        made, algorithm("ibpo", ibpo_corrections=2, ibpo_correction_group="pair")
    )
    made = [group(RIGHT, [10, 14], [11, 14])]
    per_prompt = Loop(in_turn(*answers)).credit(made, algorithm("ibpo", ibpo_corrections=2))
    assert [s.advantage for s in by_kind(per_pair, "correction")] == pytest.approx([1, -1, 0, 0], abs=1e-7)
    assert [s.advantage for s in by_kind(per_prompt, "correction")] == pytest.approx(
        [3**-0.5, -(3**0.5), 3**-0.5, 3**-0.5], abs=1e-7
    )
    assert per_pair.metrics["degenerate_correction_groups"] == 1
    assert per_prompt.metrics["degenerate_correction_groups"] == 0


def test_rewrites_pay_at_the_source():
    """Of four corrections two are right; of these one is farther than α from y, and so is one of the wrong
    ones: rewards 1, 1 - ρ, 0, -ρ with ρ = .5. The responses' own rewards do not pay."""
    y = [10, 11, 12, 14]
    answers = in_turn([10, 11, 12, 13], [20, 21, 22, 13], [10, 11, 12, 15], [20, 21, 22, 23])
    made = group([10, 11, 22, 13], y)
    credit = Loop(answers).credit([made], algorithm("ibpo-rewrite-penalty"))
    assert [c.distance for c in made.corrections] == [0.25, 1.0, 0.25, 1.0]
    assert [c.beyond_threshold for c in made.corrections] == [False, True, False, True]
    rewards = [1.0, 0.5, 0.0, -0.5]
    std = math.sqrt((0.75**2 + 0.25**2 + 0.25**2 + 0.75**2) / 4)
    assert [s.advantage for s in by_kind(credit, "correction")] == pytest.approx(
        [(r - 0.25) / std for r in rewards], abs=1e-6
    )
    assert [s.advantage for s in by_kind(credit, "response")] == group_z_score([1.0, 0.6 * 0.5 / 4])
    assert credit.metrics["beyond_threshold_rate"] == 0.5


def test_a_far_correction_pays_even_where_the_reference_makes_it_no_rewrite():
    """d(y, ŷ) > α, and ŷ is just as far from the reference: no rewrite, yet beyond α."""
    made = group([30, 31, 32, 13], [10, 11, 12, 14])
    answers = in_turn([20, 21, 22, 23], [10, 11, 12, 15], [10, 11, 12, 16], [10, 11, 12, 17])
    credit = Loop(answers).credit([made], algorithm("ibpo-rewrite-penalty"))
    assert not made.corrections[0].rewritten
    assert made.corrections[0].beyond_threshold
    assert by_kind(credit, "correction")[0].advantage < 0


# ----------------------------------------------------------------------------------------- strip thinking


@pytest.mark.parametrize(
    ("prompt_ids", "content", "seen"),
    [
        ((1, 2), [THINK, 5, 6, END_THINK, 7, 8], [7, 8]),
        ((1, 2), [4, THINK, 5, END_THINK, 7], [4, 7]),
        ((1, 2), [4, THINK, 5, END_THINK, 7, THINK, 6, END_THINK, 8], [4, 7, 8]),
        ((1, 2), [7, THINK, 5], [7]),  # never closed
        ((1, THINK), [5, 6, END_THINK, 7], [7]),  # the prompt opens it
        ((1, THINK), [5, 6], []),
        ((THINK, 3, END_THINK), [5, 6], [5, 6]),  # opened and closed there
        ((1, 2), [5, END_THINK, 7], [7]),  # it was not opened
        ((1, 2), [5, 6], [5, 6]),
        ((1, 2), [], []),
    ],
)
def test_what_is_shown_of_a_solution_that_thinks(prompt_ids, content, seen):
    part = part_in_prompt(response(content, 0.0, prompt=prompt_ids), MARKS)
    assert part.ids.tolist() == seen
    assert [content[place] for place in part.places] == seen


def test_marks_of_several_tokens_are_found():
    marks = ThinkingMarks((60, 61), (60, 62))
    part = part_in_prompt(response([60, 61, 5, 60, 60, 62, 61, 7, 60], 0.0, prompt=(1,)), marks)
    assert part.ids.tolist() == [61, 7, 60]


def test_hidden_thinking_is_neither_shown_nor_compared_and_keeps_its_gradient():
    """y hides four tokens and shows 10 11 14; of these ŷ keeps two of three, after other thoughts."""
    right = [THINK, 50, END_THINK, 10, 11, 13]
    wrong = [THINK, 51, 52, END_THINK, 10, 11, 14]
    corrected = [THINK, 53, 54, 55, 56, 57, END_THINK, 10, 11, 13]
    loop = Loop(lambda x: corrected)
    settings = {"ibpo_variant": "mask", "ibpo_strip_thinking": True}
    made = group(right, wrong)
    credit = loop.credit([made], algorithm("ibpo", **settings), vocabulary={"thinking": MARKS})
    assert candidates(loop.asked[0]) == [[10, 11, 14], [10, 11, 13]]
    (correction,) = made.corrections
    assert (correction.distance, correction.reference_distance) == (pytest.approx(1 / 3), 0.0)
    assert correction.unmodified_share == pytest.approx(2 / 3)
    assert ids_of(by_kind(credit, "response")[1].token_weights) == (1, 1, 1, 1, 0, 0, 1, 0)


def test_without_the_option_thinking_is_shown_whole():
    wrong = [THINK, 51, END_THINK, 14]
    loop = Loop(fix_last)
    loop.credit([group(RIGHT, wrong)], algorithm("ibpo"), vocabulary={"thinking": MARKS})
    assert candidates(loop.asked[0]) == [wrong, RIGHT]


# ---------------------------------------------------------------------------------- the second operator


def texts_of(ids):
    """Tokens below 30 are the digit of their last place, 30 is a plus, 31 an equals sign, 32 a hash."""
    return [{30: "+", 31: "=", 32: "#"}.get(i, str(i % 10)) for i in ids]


def sums(*results, answer):
    """`1+1=…+1=…#answer` with these results, one token a number."""
    ids = [11]
    for result in results:
        ids += [30, 11, 31, 10 + result]
    return [*ids, 32, 10 + answer]


def agreement(**settings):
    return algorithm("ibpo-shaping-only", ibpo_operator=AGREEMENT, **settings)


def test_agreement_is_the_share_of_steps_that_correct_responses_have_too():
    """Steps of `1+1=2+1=3#3`: `1+1=2`, `+1=3`, `#3`. The first wrong one has one step of three of those, the
    second none. λ = .6."""
    right, near, far = sums(2, 3, answer=3), sums(2, 4, answer=4), sums(5, 6, answer=6)
    loop = Loop(fix_last)
    credit = loop.credit([group(right, near, far)], agreement(), vocabulary={"token_texts": texts_of})
    assert loop.requests == []
    assert [s.advantage for s in credit.sequences] == group_z_score([1.0, 0.6 / 3, 0.0])
    assert credit.metrics["agreement"] == pytest.approx(1 / 6)
    assert all(s.token_weights is None for s in credit.sequences)
    assert "corrections" not in credit.metrics


def test_agreement_may_say_which_tokens_to_learn_from():
    right, near = sums(2, 3, answer=3), sums(2, 4, answer=4)
    credit = Loop(fix_last).credit(
        [group(right, near)], agreement(ibpo_variant="mask"), vocabulary={"token_texts": texts_of}
    )
    # `1+1=2` agrees; `+1=4` and `#4` do not; both end
    assert token_weights(credit.sequences) == [None, (0,) * 5 + (1,) * 4 + (1,) * 2 + (0,)]


def test_without_a_correct_response_nothing_agrees():
    credit = Loop(fix_last).credit(
        [group(sums(2, 4, answer=4), sums(2, 5, answer=5))],
        agreement(ibpo_variant="mask"),
        vocabulary={"token_texts": texts_of},
    )
    assert [s.advantage for s in credit.sequences] == [0.0, 0.0]
    assert token_weights(credit.sequences) == [None, None]


def test_an_operator_that_is_not_lent_what_it_needs_says_so():
    with pytest.raises(ValueError, match="texts of tokens"):
        Loop(fix_last).credit([group(RIGHT, [14])], agreement())
    with pytest.raises(ValueError, match="marks of thinking"):
        Loop(fix_last).credit([group(RIGHT, [14])], algorithm("ibpo", ibpo_strip_thinking=True))


# ------------------------------------------------------------------------------------- the check at start


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            of_preset("gspo") | {"ibpo_lambda": 0.6},
            "--ibpo-lambda: gspo with --ibpo-operator none has no such parameter; --ibpo-operator "
            "compare-and-correct has it",
        ),
        (of_preset("gspo") | {"ibpo_joint": True}, "--ibpo-joint: gspo with --ibpo-operator none"),
        (
            {"ibpo_operator": AGREEMENT, "ibpo_joint": True},
            f"--ibpo-joint: ibpo with --ibpo-operator {AGREEMENT} has no such parameter",
        ),
        ({"ibpo_operator": AGREEMENT, "ibpo_variant": "ratio"}, "ibpo_variant: 'ratio' is not one of"),
        ({"ibpo_corrections": 0}, r"--ibpo-corrections: must be .*for none, --ibpo-operator none\), is 0"),
        ({"ibpo_mask_insertions": True}, "--ibpo-mask-insertions"),
        (
            {"ibpo_variant": "signed-mask", "advantages": "critic"},
            "--ibpo-variant signed-mask goes by the sign",
        ),
        ({"ibpo_correction_group": "pair"}, "--ibpo-correction-group pair"),
        ({"ibpo_rewrite_penalty": 0.5, "ibpo_joint": False}, "--ibpo-rewrite-penalty acts on"),
        ({"ibpo_rewrite_penalty": -0.5}, "--ibpo-rewrite-penalty: must be .*, is -0.5"),
        ({"ibpo_variant": "ratio", "ibpo_lambda": 1.0}, "--ibpo-lambda 1.0 times a share of up to 1 is 1"),
    ],
)
def test_what_a_setting_needs_beside_it_is_named(settings, says):
    with pytest.raises(ValueError, match=says):
        check_algorithm(algorithm(**settings))


def test_lambda_times_beta_may_exceed_what_a_share_may_not():
    check_algorithm(algorithm(ibpo_lambda=1.5, ibpo_beta=0.5))


def test_the_papers_base_settings():
    assert PRESETS["ibpo"] == {
        "loss_variant": "gspo", "ibpo_operator": "compare-and-correct", "ibpo_variant": "base",
        "ibpo_lambda": 0.6, "ibpo_beta": 0.5, "ibpo_k": 2, "ibpo_corrections": 1,
        "ibpo_rewrite_threshold": 0.6, "ibpo_rewrite_penalty": 0.0, "ibpo_joint": True,
        "ibpo_plain_prompt": "none", "ibpo_correction_group": "prompt", "token_credit": "uniform",
        "advantages": "group", "dynamic_sampling": False, "dynamic_sampling_by": "credit",
        "overlong_buffer_share": 0.0,
    }  # fmt: skip
