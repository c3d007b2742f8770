"""CIW by hand: spans, what the answer loses without them, and token weights."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import token_ids
from megatron_ibpo.credit.importance import importance_weights
from megatron_ibpo.credit.spans import split_spans
from support.credit_cases import EOS, Loop, algorithm, by_kind, fix_last, group, ids_of, of_preset, response

MASK = 0


def logs(whole, *masked):
    """Log-probs of an answer from its probabilities: whole, and without each step."""
    return math.log(whole), [math.log(left) for left in masked]


def spans(text):
    """The spans of a text of one-character tokens."""
    return [text[first:last] for first, last in split_spans(list(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6+1=7-8=-1#-1", ["6+1=7", "-8=-1", "#-1"]),
        ("23 + 45 = 68. So the answer is 68.", ["23 + 45 = 68.", " So the answer is 68."]),
        ("Let me think.\nx = 2.5, then\ny", ["Let me think.\n", "x = 2.5", ", then\n", "y"]),
        ("Is it 3.14? Yes! Good", ["Is it 3.14?", " Yes!", " Good"]),
        ("a=1,000.\n\n#7", ["a=1,000.\n\n", "#7"]),
        ("no end", ["no end"]),
        ("...\n.\n", ["...\n.\n"]),
        ("", []),
    ],
)
def test_a_solution_is_cut_into_lines_sentences_and_calculations(text, expected):
    assert spans(text) == expected


@given(st.lists(st.text("ab1 =+.\n#", max_size=4), max_size=12))
def test_spans_cover_all_tokens_in_order(texts):
    found = split_spans(texts)
    assert [i for first, last in found for i in range(first, last)] == list(range(len(texts)))
    assert all(first < last for first, last in found)


def test_the_token_in_which_an_end_falls_belongs_to_the_span_whole():
    assert split_spans(["1+1", "=2+", "1", "=3"]) == [(0, 2), (2, 4)]


# -------------------------------------------------------------------------------------------------- weights


def test_weights_are_importance_over_its_mean():
    """Steps of 3, 1 and 2 tokens drop .4, .1 and -.2 (a distractor: 0). Mean (3·.4 + .1)/6 = 13/60."""
    answer = response([10] * 7, 1.0)
    weights = importance_weights(answer, [(0, 3), (3, 4), (4, 6)], *logs(0.5, 0.1, 0.4, 0.7), inverted=False)
    mean = 1.3 / 6
    assert ids_of(weights) == pytest.approx((0.4 / mean,) * 3 + (0.1 / mean,) + (0.0,) * 2 + (1.0, 1.0))
    assert sum(weights) / len(weights) == pytest.approx(1)


def test_inverted_weights_turn_the_order_round():
    """.4, .1, 0 become 0, .3, .4: mean (.3 + 2·.4)/6."""
    answer = response([10] * 7, 1.0)
    weights = importance_weights(answer, [(0, 3), (3, 4), (4, 6)], *logs(0.5, 0.1, 0.4, 0.7), inverted=True)
    mean = 1.1 / 6
    assert ids_of(weights) == pytest.approx((0.0,) * 3 + (0.3 / mean,) + (0.4 / mean,) * 2 + (1.0, 1.0))


@pytest.mark.parametrize(
    "left",
    [
        (0.5, 0.5),
        (0.6, 0.8),
        (0.3, 0.3),
        (0.5 - 1e-12, 0.5),  # a rounding error is no importance
        (0.5 + 1e-12, 0.5),
        (0.496, 0.504),  # .008 nats either way
    ],
)
@pytest.mark.parametrize("inverted", [False, True])
def test_steps_that_all_count_the_same_leave_uniform_credit(left, inverted):
    steps = [(0, 1), (1, 2)]
    assert importance_weights(response([10] * 3, 1.0), steps, *logs(0.5, *left), inverted=inverted) is None


def test_the_floor_is_a_hundredth_of_a_nat():
    """e^-.011 of a probability is a drop, e^-.009 none; of two drops that differ by a rounding error neither
    is the smaller one for the control."""
    answer, steps = response([10] * 3, 1.0), [(0, 1), (1, 2)]

    def weights(*left, inverted=False):
        return ids_of(importance_weights(answer, steps, -1.0, left, inverted=inverted))

    assert weights(-1.011, -1.009) == pytest.approx((2, 0, 1, 1))
    assert weights(-1.009, -1.009) is None
    assert weights(-1.011, -1.009, inverted=True) is None, "they are .002 nats from each other"
    assert weights(-3.0, -3.0 - 1e-12, inverted=True) is None
    assert weights(-3.0, -1.0, inverted=True) == pytest.approx((0, 2, 1, 1))


# -------------------------------------------------------------------------------------------- the operator


def texts_of(ids):
    """Token 20 ends a line, 13 is the right answer's; all others are a word."""
    return ["\n" if token == 20 else "w" for token in ids]


def ciw(name="ciw", **settings):
    return algorithm(**of_preset(name) | {"overlong_buffer_share": 0.0} | settings)


def policy(probability):
    """The policy's answers to questions of the probability of an answer; and the questions."""
    asked = []

    def logprobs(queries):
        asked.extend(queries)
        return [
            np.array([math.log(probability(q)), *[0.0] * (len(q.continuation) - 1)], np.float32)
            for q in queries
        ]

    return logprobs, asked


def credit_of(groups, config, probability):
    logprobs, asked = policy(probability)
    loop = Loop(fix_last)
    vocabulary = {"token_texts": texts_of, "placeholder_id": MASK}
    credit = loop.credit(groups, config, logprobs=logprobs, vocabulary=vocabulary)
    assert loop.requests == []
    return credit, asked


def test_each_step_is_masked_once_and_the_answer_asked_for():
    """Two lines of two and three tokens, then the answer. Masking the first drops its probability from .8 to
    .2, masking the second to .6: weights .6 and .2 over the mean (2·.6 + 3·.2)/5 = .36."""
    right, wrong = [10, 20, 11, 12, 20, 12, 13], [14]
    after = {(10, 20, 11, 12, 20): 0.8, (MASK, MASK, 11, 12, 20): 0.2, (10, 20, MASK, MASK, MASK): 0.6}
    credit, asked = credit_of([group(right, wrong)], ciw(), lambda q: after[ids_of(q.context)[3:]])
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


def test_distractors_are_clipped_and_counted_and_flat_responses_too():
    made = group([10, 20, 11, 20, 13], [12, 20, 14])

    def probability(q):
        masked_first, masked_second = q.context[3] == MASK, ids_of(q.context[5:6]) == (MASK,)
        return 0.9 if masked_first else 0.3 if masked_second else 0.5

    credit, _ = credit_of([made], ciw(), probability)
    right, wrong = by_kind(credit, "response")
    assert ids_of(right.token_weights) == pytest.approx((0, 0, 2, 2, 1, 1))
    assert wrong.token_weights is None
    assert (credit.metrics["distractor_spans"], credit.metrics["flat_importance"]) == (2, 1)


def test_groups_without_a_gradient_ask_nothing():
    credit, asked = credit_of([group([10, 20, 13], [11, 20, 13])], ciw(), lambda q: 0.5)
    assert asked == []
    assert credit.metrics["importance_queries"] == 0


def test_the_question_is_put_as_the_response_was_sampled():
    made = group([10, 20, 13], [14])
    made.responses[0].prompt_token_ids = token_ids([1, 5, 6, 27])
    made.responses[0].temperature = 0.7
    _, asked = credit_of([made], ciw(), lambda q: 0.5)
    assert [ids_of(q.context) for q in asked] == [(1, 5, 6, 27, 10, 20), (1, 5, 6, 27, MASK, MASK)]
    assert {q.temperature for q in asked} == {0.7}


def test_the_control_differs_in_the_order_of_its_weights_alone():
    def weights(name):
        made = group([10, 20, 11, 20, 13], [14])
        credit, _ = credit_of([made], ciw(name), lambda q: {10: 0.8}.get(q.context[3], 0.1) if q else 0)
        return ids_of(credit.sequences[0].token_weights)

    assert weights("ciw") == pytest.approx((2, 2, 0, 0, 1, 1))
    assert weights("ciw-inverted") == pytest.approx((0, 0, 2, 2, 1, 1))


def test_what_the_operator_needs():
    with pytest.raises(ValueError, match="the policy's log-probs"):
        Loop(fix_last).credit([group([13], [14])], ciw())
    with pytest.raises(ValueError, match="--ciw-inverted"):
        algorithm(**of_preset("gspo") | {"ciw_inverted": True})
    with pytest.raises(ValueError, match="--ibpo-joint: ciw with --ibpo-operator span-masking"):
        ciw(ibpo_joint=True)
