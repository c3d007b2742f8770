"""Weights of tokens: token credits (--token-credit), the self-teacher, and the steps that an answer needs."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit import TokenFactors
from megatron_ibpo.credit.divergence import normalised
from megatron_ibpo.credit.importance import importance_weights
from megatron_ibpo.credit.pairing import split_spans

from support.credit_cases import (  # isort: skip
    AGREEMENT, EOS, PROMPT, RANDOM_WINDOW, RIGHT, Loop, algorithm, by_kind, candidates, fix_last, group,
    ids_of, of_preset, prompt, response, token_weights,
)  # fmt: skip

CHOOSING = ["divergence-window", "divergence-cut", RANDOM_WINDOW]
WRONG, MASK = [10, 11, 12, 14], 0


def gspo(token_credit="uniform", **settings):
    return algorithm("gspo", token_credit=token_credit, **settings)


def weights_of(made, config, **settings):
    """Token weights of the responses of one group."""
    credit = Loop(fix_last).credit([made], config, **settings)
    return token_weights(by_kind(credit, "response"))


def beside_right(*wrong, right=RIGHT):
    return Group(prompt(), [*group(right).responses, *wrong])


def test_wrong_weight_scales_wrong_responses_beside_right_ones():
    made = [group(RIGHT, [14], [15, 16])]
    credit, without = (Loop(fix_last).credit(made, gspo(name)) for name in ("wrong-weight", "uniform"))
    assert token_weights(credit.sequences) == [None, (0.075,) * 2, (0.075,) * 3]
    assert [s.advantage for s in credit.sequences] == [s.advantage for s in without.sequences]
    # 5 tokens count 1, and 2 + 3 count .075
    assert credit.metrics["token_weight_mean"] == pytest.approx((5 + 0.075 * 5) / 10)
    assert credit.metrics["weightless_responses"] == 0
    assert "token_weight_mean" not in without.metrics
    none = Loop(fix_last).credit(made, gspo("wrong-weight", token_credit_weight=0.0))
    assert token_weights(none.sequences) == [None, (0, 0), (0, 0, 0)]
    assert none.metrics["weightless_responses"] == 2
    # it multiplies the operator's weights, here a mask of 0 0 0 1 0, and leaves corrections alone
    masked = algorithm("ibpo-mask", token_credit="wrong-weight")
    credit = Loop(fix_last).credit([group(RIGHT, WRONG)], masked)
    assert token_weights(credit.sequences) == [None, (0.0, 0.0, 0.0, 0.075, 0.0), None]


def test_wrong_weight_by_length_counts_two_tokens_per_wrong_response():
    """n trained tokens with 2/n each; one token cannot count as two. Tool output is no trained token."""
    with_tool = response([50, 51, 14], 0.0, written=[False, False, True])
    made = beside_right(response([14, 15, 16], 0.0), with_tool, response([14], 0.0, "length"))
    assert weights_of(made, gspo("wrong-weight-by-length")) == [None, (0.5,) * 4, (1.0,) * 4, (1.0,)]


def test_the_divergence_window_starts_after_the_longest_shared_prefix():
    """Shared with the first right response: 10; with the second: 10 11 12. The window holds tokens 3 and 4,
    of which the last is the end."""
    made = group([10, 13], RIGHT, WRONG)
    assert weights_of(made, gspo("divergence-window")) == [None, None, (0, 0, 0, 1, 1)]
    assert weights_of(made, gspo("divergence-window", token_credit_tokens=1))[2] == (0, 0, 0, 1, 0)
    with_tool = response([10, 14, 50, 51, 15], 0.0, written=[True, True, False, False, True])
    (_, weights) = weights_of(beside_right(with_tool), gspo("divergence-window"))
    assert np.array(weights)[with_tool.loss_mask].tolist() == [0, 1, 1, 0], "the policy wrote these"


def test_where_a_response_stops_too_early_or_too_late():
    for wrong, cut, window in (
        (response([10, 11], 0.0), (0, 0, 1), (0, 0, 1)),  # it stops where it should have gone on
        (response(RIGHT[:2], 0.0, "length"), (0, 0), (0, 0)),  # it was cut off
        (response([*RIGHT, 14], 0.0), (0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1)),  # it goes on too long
        (response([14] * 4, 0.0), (1, 1, 1, 1, 1), (1, 1, 0, 0, 0)),  # nothing is shared
    ):
        for name, expected in (("divergence-cut", cut), ("divergence-window", window)):
            credit = Loop(fix_last).credit([beside_right(wrong)], gspo(name))
            assert token_weights(credit.sequences) == [None, expected], name
            assert credit.metrics["weightless_responses"] == float(not any(expected)), name


def test_responses_without_a_right_sibling_learn_as_a_whole():
    """A graded reward makes the group informative, and none is correct; one has no score at all."""
    made = Group(prompt(), [response([14], 0.4), response([15], 0.0), response([13], None)])
    for name in ("wrong-weight", "wrong-weight-by-length", *CHOOSING):
        assert weights_of(made, gspo(name)) == [None, None], name


@pytest.mark.parametrize("name", CHOOSING)
def test_responses_that_are_made_likelier_learn_as_a_whole(name):
    """IBPO's bonus lifts a wrong one above the mean: rewards 1 .3 0 0 0 0, mean .22."""
    far = [20, 21, 22]
    loop = Loop(lambda x: RIGHT if candidates(x)[0] == WRONG else far)
    credit = loop.credit([group(RIGHT, WRONG, far, far, far, far)], algorithm(token_credit=name))
    _, lifted, *others = by_kind(credit, "response")
    assert lifted.advantage > 0 > others[0].advantage
    assert (lifted.token_weights, others[0].token_weights is None) == (None, False)


@given(st.lists(st.lists(st.integers(10, 13), min_size=1, max_size=6), min_size=2, max_size=5))
def test_the_divergence_cut_keeps_tokens_outside_every_right_prefix(contents):
    """It is compared with a definition by sets of prefixes: token t is shared if some right response has all
    tokens up to it."""
    made = group(*contents)
    right = [tuple(sample.token_ids) for sample in made.responses if sample.correct]
    shared = {ids[:n] for ids in right for n in range(1, len(ids) + 1)}
    for sample, weights in zip(made.responses, weights_of(made, gspo("divergence-cut")), strict=True):
        begun = [tuple(sample.token_ids[: t + 1]) for t in range(len(sample.token_ids))]
        learns = None if sample.correct or not shared else tuple(float(ids not in shared) for ids in begun)
        assert weights == learns


def test_step_matching_ignores_white_space_and_number_spelling():
    """Right: "We add 1,000" | "So 7." Wrong: "We   add 1000.0" | "So 8." They part at the second step."""
    words = ["We ", "add", " 1,000", "\n", " 1000.0", "  ", "So", " 7", ".", " 8"]  # from token 10 on
    right = response([10, 11, 12, 13, 16, 17, 18], 1.0)

    def weights(content, name, finish_reason="stop", unit="step"):
        made = Group(prompt(), [right, response(content, 0.0, finish_reason)])
        texts = {"token_texts": lambda ids: [words[token - 10] for token in ids]}
        return weights_of(made, gspo(name, token_credit_unit=unit), vocabulary=texts)[1]

    wrong = [10, 15, 11, 14, 13, 16, 19, 18]
    assert weights(wrong, "divergence-window") == (0, 0, 0, 0, 0, 1, 1, 1, 0)
    assert weights(wrong, "divergence-cut") == (0, 0, 0, 0, 0, 1, 1, 1, 1)
    assert weights(wrong, "divergence-cut", unit="token") == (0, *[1] * 8), "another token of that meaning"
    # one that ends after shared steps learns from its end
    assert weights([10, 11, 14, 13], "divergence-window") == (0, 0, 0, 0, 1)
    assert weights([10, 11, 14, 13], "divergence-window", "length") == (0, 0, 0, 0)
    alike = [("6+1 = 7", "6 + 1=7"), ("1,234.50", "1234.5"), ("007", "7"), ("0.0", "0")]
    unlike = [("add 1 2", "add 12"), ("1, 200", "1,200"), ("10", "100"), ("x = 2.5", "x = 25")]
    assert [normalised(one) == normalised(other) for one, other in alike + unlike] == [True] * 4 + [False] * 4


def test_the_random_window_is_uniform_and_reproducible():
    """Over 600 draws each of the three places of a response of 3 tokens and its end comes up about as often:
    200, with a standard deviation of 11.5."""
    config, made = gspo(RANDOM_WINDOW), group(RIGHT, [14, 15, 16])
    drawn, again = ([weights_of(made, config, step=step)[1] for step in range(600)] for _ in range(2))
    assert drawn == again
    places = {(1, 1, 0, 0), (0, 1, 1, 0), (0, 0, 1, 1)}
    assert set(drawn) == places
    assert all(abs(drawn.count(place) - 200) < 60 for place in places)
    # it lies in what the policy wrote and may be all of it
    with_tool = response([50, 51, 14], 0.0, written=[False, False, True])
    made = beside_right(response([14], 0.0), with_tool, response([14], 0.0, "length"))
    assert weights_of(made, config) == [None, (1, 1), (0, 0, 1, 1), (1,)]


def too_short(groups, advantages, context):
    return TokenFactors([[np.ones(2)] * len(group.responses) for group in groups])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"token_credit": f"{__name__}:too_short"}, r"shape \(2,\) for a response of 5 tokens"),
        ({"token_credit": "wrong"}, "--token-credit wrong: unknown token credit; there are uniform"),
        ({"token_credit": "divergence-cut", "token_credit_unit": "step"}, "texts of tokens"),
        (of_preset("ibpo-shaping-only") | {"ibpo_operator": AGREEMENT}, "texts of tokens"),
        ({"ibpo_strip_thinking": True}, "marks of thinking"),
        (of_preset("ciw"), "the policy's log-probs"),
        ({"token_credit": "self-teacher"}, "log-probs"),
        (of_preset("ppo"), "needs a critic"),
    ],
)
def test_bad_token_weights_and_missing_capabilities_are_named(settings, says):
    with pytest.raises(ValueError, match=says):
        Loop(fix_last).credit([group(RIGHT, [10, 14])], algorithm(**settings))


def asked_of(groups, config, answer, **settings):
    """(credit, questions), of a policy with these log-probs of a question; token 20 ends a line."""
    asked = []

    def logprobs(queries):
        asked.extend(queries)
        return [np.array(answer(query)[: len(query.continuation)], np.float32) for query in queries]

    texts = {"token_texts": lambda ids: ["\n" if i == 20 else "w" for i in ids], "placeholder_id": MASK}
    return Loop(fix_last).credit(groups, config, logprobs=logprobs, vocabulary=texts, **settings), asked


def taught(groups, *gaps, preset="gspo", max_context=100, **settings):
    """By a teacher that finds tokens this much likelier than the engine, whose log-probs are -.5."""
    config = algorithm(preset, token_credit="self-teacher", **settings)
    return asked_of(groups, config, lambda query: [gap - 0.5 for gap in gaps], max_context=max_context)


def test_tokens_that_the_teacher_finds_unlikely_are_pushed_down_more():
    """a = .5 -.5 0 3 -3: m = 1 + η clip(-a, -1, 1) = .5 1.5 1 0 2, at η = ½ halfway to 1."""
    gaps = (0.5, -0.5, 0.0, 3.0, -3.0)
    full, _ = taught([group(RIGHT, WRONG)], *gaps)
    assert token_weights(full.sequences) == [None, pytest.approx((0.5, 1.5, 1.0, 0.0, 2.0))]
    half, _ = taught([group(RIGHT, WRONG)], *gaps, token_credit_eta=0.5)
    assert token_weights(half.sequences) == [None, pytest.approx((0.75, 1.25, 1.0, 0.5, 1.5))]
    assert full.metrics["teacher_gap"] == pytest.approx(0.0)
    without = Loop(fix_last).credit([group(RIGHT, WRONG)], gspo())
    assert [s.advantage for s in full.sequences] == [s.advantage for s in without.sequences]
    # it multiplies what IBPO says: the mask keeps the token that the correction changes, the fourth
    masked, _ = taught([group(RIGHT, WRONG)], *[-0.5] * 5, preset="ibpo-mask")
    assert token_weights(masked.sequences) == [None, (0.0, 0.0, 0.0, 1.5, 0.0), None]
    # tokens that the policy did not write have no gap
    with_tool = response(WRONG, 0.0, written=[True, False, True, True])
    credit, _ = taught([beside_right(with_tool)], *[-1.0] * 5)
    assert ids_of(credit.sequences[1].token_weights) == (2.0, 1.0, 2.0, 2.0, 2.0)


def test_the_teacher_sees_a_right_response_and_nothing_else():
    """A teacher that agrees changes nothing."""
    groups = [group(RIGHT, WRONG, [10, 15]), group(WRONG, WRONG, index=1), group(RIGHT, RIGHT, index=2)]
    credit, asked = taught(groups, *[0.0] * 5)
    assert [ids_of(q.context) for q in asked] == [(*PROMPT[:2], 90, *RIGHT, PROMPT[2])] * 2
    assert [ids_of(q.continuation) for q in asked] == [(*WRONG, 2), (10, 15, 2)]
    assert token_weights(credit.sequences) == [None, (1.0,) * 5, (1.0,) * 3, *[None] * 4]
    assert credit.metrics["teacher_tokens"] == (3 + 5 + 5) + (3 + 5 + 3)
    # one whose pass of 3 + 1 + 4 and 5 tokens would not fit learns as a whole
    credit, asked = taught([group(RIGHT, WRONG)], *[-1.0] * 5, max_context=12)
    assert (asked, token_weights(credit.sequences)) == ([], [None, None])
    assert (credit.metrics["teacher_skipped"], credit.metrics["teacher_tokens"]) == (1, 0)


def test_a_solution_is_cut_into_lines_sentences_and_calculations():
    for spans in (
        ["6+1=7", "-8=-1", "#-1"],
        ["23 + 45 = 68.", " So the answer is 68."],
        ["Let me think.\n", "x = 2.5", ", then\n", "y"],
        ["Is it 3.14?", " Yes!", " Good"],
        ["a=1,000.\n\n", "#7"],
        ["...\n.\n"],
        [],
    ):
        text = "".join(spans)
        assert [text[first:last] for first, last in split_spans(list(text))] == spans
    # the token in which an end falls belongs to the span whole
    assert split_spans(["1+1", "=2+", "1", "=3"]) == [(0, 2), (2, 4)]


def test_the_floor_is_a_hundredth_of_a_nat():
    """e^-.011 of a probability is a drop, e^-.009 none; of two drops that differ by a rounding error neither
    is the smaller one for the control."""

    def importance(ends, whole, left, inverted=False):
        """Weights of a response whose steps end there, by the answer's log-prob, and those without each."""
        answer, steps = response([10] * (ends[-1] + 1), 1.0), list(pairwise([0, *ends]))
        return ids_of(importance_weights(answer, steps, whole, left, inverted=inverted))

    assert importance((1, 3), -1.0, (-1.011, -1.009)) == pytest.approx((3, 0, 0, 1, 1))
    assert importance((1, 2), -1.0, (-1.009, -0.991)) is None
    assert importance((1, 2), -1.0, (-3.0, -3.0)) is None, "all count the same"
    assert importance((1, 2), -1.0, (-1.011, -1.009), inverted=True) is None, "they are .002 nats apart"
    assert importance((1, 2), -1.0, (-3.0, -3.0 - 1e-12), inverted=True) is None
    # steps of 3, 1 and 2 tokens: drops of .4, .1 and 0 of a probability become 0, .3 and .4, of mean 1.1/6
    left = [math.log(chance) for chance in (0.1, 0.4, 0.7)]
    found = importance((3, 4, 6), math.log(0.5), left, inverted=True)
    assert found == pytest.approx([6 * w / 1.1 for w in (0, 0, 0, 0.3, 0.4, 0.4)] + [1, 1])


def weighed(groups, probability):
    """By a policy that finds an answer this probable."""
    config = algorithm("ciw", overlong_buffer_share=0.0)
    return asked_of(groups, config, lambda query: [math.log(probability(query)), 0.0, 0.0])


def test_each_step_is_masked_once_and_the_answer_asked_for():
    """Two lines of two and three tokens, then the answer. Masking the first drops its probability from .8 to
    .2, masking the second to .6: weights .6 and .2 over the mean (2·.6 + 3·.2)/5 = .36."""
    right, wrong = [10, 20, 11, 12, 20, 12, 13], [14]
    after = {(10, 20, 11, 12, 20): 0.8, (MASK, MASK, 11, 12, 20): 0.2, (10, 20, MASK, MASK, MASK): 0.6}
    credit, asked = weighed([group(right, wrong)], lambda q: after[ids_of(q.context)[3:]])
    assert [ids_of(q.context)[:3] for q in asked] == [(1, 5, 27)] * 3
    assert [ids_of(q.continuation) for q in asked] == [(12, 13)] * 3
    first, second = by_kind(credit, "response")
    assert ids_of(first.token_weights) == pytest.approx((0.6 / 0.36,) * 2 + (0.2 / 0.36,) * 3 + (1.0,) * 3)
    assert ids_of(first.response_token_ids) == (*right, EOS)
    assert second.token_weights is None, "nothing but an answer"
    assert [s.advantage for s in credit.sequences] == pytest.approx([1, -1], abs=1e-7)
    assert credit.metrics["importance_queries"] == 3
    assert credit.metrics["importance_tokens"] == 3 * (3 + 5 + 2)
    assert (credit.metrics["masked_spans"], credit.metrics["distractor_spans"]) == (2, 0)
    without_gradient, asked = weighed([group([10, 20, 13], [11, 20, 13])], lambda q: 0.5)
    assert (asked, without_gradient.metrics["importance_queries"]) == ([], 0)


def test_step_questions_keep_the_sampled_prompt_and_skip_tool_output():
    """Three lines, of which the second is a tool's: the answer is asked for once as it is and once without
    the first."""
    settings = {"prompt": (1, 5, 6, 27), "temperature": 0.7}
    lines = response([10, 20, 50, 20, 13], 1.0, written=[1, 1, 0, 0, 1], **settings)
    credit, asked = weighed([Group(prompt(), [lines, response([14], 0.0)])], lambda q: 0.5)
    assert [ids_of(q.context[:4]) for q in asked] == [(1, 5, 6, 27)] * 2
    assert [ids_of(q.context[4:]) for q in asked] == [(10, 20, 50, 20), (MASK, MASK, 50, 20)]
    assert {q.temperature for q in asked} == {0.7}
    assert credit.metrics["masked_spans"] == 1
