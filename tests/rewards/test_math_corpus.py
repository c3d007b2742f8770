"""Grading of mathematics: answers by hand, answers right or wrong by how they were made, and noise."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import LabelError, Score, Verifier, check_labels, open_verifier
from megatron_ibpo.rewards.final_answer import final_boxes
from support.answer_pairs import Pair, noise, pairs


@pytest.fixture(scope="module")
def verifier():
    data = DataConfig(rm_type="math", reward_workers=1, reward_timeout=60)  # other things run besides
    with open_verifier(data) as opened:
        yield opened
        assert opened._pool.deaths == 0


def prompt(label: str, text: str = "What is it?", task: str = "math") -> Prompt:
    return Prompt(0, token_ids([]), 0, label, task, text)


ANSWERS = [
    # label, response, reward
    ("42", r"so we get \boxed{42}.", 1.0), ("42", r"so we get $\boxed{ 42 }$.", 1.0),
    ("42", "The final answer is 42.", 1.0), ("42", "The final answer is $42$.", 1.0),
    ("42", r"\boxed{43}", 0.0), ("42", r"42, so \boxed{43}", 0.0),
    ("42", r"first \boxed{41}, no: \boxed{42}", 1.0), ("42", r"first \boxed{42}, no: \boxed{41}", 0.0),
    ("42", r"\boxed{42} and then cut off \boxed{4", 1.0), ("42", "I do not know", 0.0), ("42", "", 0.0),
    ("42", r"\boxed{}", 0.0), (r"\boxed{7}", r"\boxed{7}", 1.0), ("$7$", r"\boxed{7}", 1.0),
    ("070", r"\boxed{70}", 1.0), ("1,000", r"\boxed{1000}", 1.0), (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
    (r"\frac12", r"\boxed{\dfrac{2}{4}}", 1.0), (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
    ("x^2+1", r"\boxed{1+x^2}", 1.0), ("5", r"\boxed{x=5}", 1.0), ("(1,2)", r"\boxed{(1, 2)}", 1.0),
    ("(1,2)", r"\boxed{(2, 1)}", 0.0), (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
    ("[0,1)", r"\boxed{[0,1)}", 1.0), ("[0,1)", r"\boxed{[0,1]}", 0.0), (r"50\%", r"\boxed{50}", 1.0),
    (r"\text{Monday}", r"\boxed{\text{Monday}}", 1.0), ("C", r"\boxed{C}", 1.0), ("C", r"\boxed{D}", 0.0),
    (r"\infty", r"\boxed{\infty}", 1.0), ("-3", r"\boxed{3}", 0.0), ("1/3", r"\boxed{0.333}", 0.0),
    # several boxes are one answer where nothing else stands between them
    (r"\{1,2,3\}", r"\boxed{1}, \boxed{2} and \boxed{3}", 1.0),
    ("1,2,3", r"$\boxed{3}$, $\boxed{2}$, and $\boxed{1}$", 1.0),
    ("(1,2)", r"x = \boxed{1}, y = \boxed{2}", 1.0), ("(1,2)", r"x = \boxed{2}, y = \boxed{1}", 0.0),
    ("3", r"\boxed{3} \boxed{3}", 1.0),
    # spellings
    ("5", r"\boxed{\$5}", 1.0), (r"\$5", r"\boxed{5}", 1.0), ("0.001", r"\boxed{1e-3}", 1.0),
    ("1e-3", r"\boxed{10^{-3}}", 1.0), ("7", r"\fbox{7}", 1.0), ("1,22", r"\boxed{1.22}", 1.0),
    ("1.22", r"\boxed{1,22}", 1.0), ("1,22", r"\boxed{22, 1}", 1.0),
    ("5000000", r"\boxed{5\text{ million}}", 1.0), ("5", r"\boxed{5\text{ million}}", 0.0),
    (r"60^\circ", r"\boxed{60°}", 1.0), ("60", r"\boxed{60^{\circ}}", 1.0), ("60", r"\boxed{61°}", 0.0),
    ("12:00", r"\boxed{12:00}", 1.0), ("12:00", "The answer is 12:00.", 1.0),
    ("12:00", r"\boxed{12:30}", 0.0), ("42", "#### 42", 1.0), ("42", "**Answer:** 42", 1.0),
    ("Yes", r"\boxed{\text{yes}}", 1.0),
    # the answer is what stands at the end, and one
    ("42", r"<think>\boxed{41}</think> \boxed{42}", 1.0),
    ("42", r"<think>\boxed{42}</think> \boxed{41}", 0.0), ("42", r"<think> so far \boxed{42}", 0.0),
    ("3", r"\boxed{1 \text{ or } 2 \text{ or } 3}", 0.0), ("3", r"\boxed{1} or \boxed{2} or \boxed{3}", 0.0),
    ("3", "The answer is 1 or 2 or 3.", 0.0), ("3", "So it is 1, 2 or 3.", 0.0),
    ("1 or 2", r"\boxed{2 \text{ or } 1}", 1.0), ("1/2", r"\boxed{0.5 \text{ or } \frac12}", 1.0),
    # what is found only by mathematics, and what is wrong only by it
    ("12", r"\boxed{1 2}", 0.0), ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0), ("(x+1)^2", r"\boxed{x^2+2x+2}", 0.0),
    ("9" * 100_000, rf"\boxed{{{'9' * 100_000}}}", 1.0), ("9" * 100_000, rf"\boxed{{{'9' * 99_999}8}}", 0.0),
]  # fmt: skip
TOO_MUCH = [r"\boxed{10^{10^{10}}}", r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 301]


def test_answers_by_hand(verifier):
    scores = verifier.score([(prompt(label), response) for label, response, _ in ANSWERS])
    found = [
        (label, response, score.reward) for (label, response, _), score in zip(ANSWERS, scores, strict=True)
    ]
    assert found == ANSWERS


def test_what_cannot_be_computed_is_wrong_and_no_error(verifier):
    scores = verifier.score([(prompt("9"), response) for response in TOO_MUCH])
    assert scores == [Score(0.0, False, details={"response_error": 1.0})] * len(TOO_MUCH)


def test_a_label_without_an_answer_is_an_error_and_named_at_the_start(verifier):
    (score,) = verifier.score([(prompt("$ $"), r"\boxed{1}")])
    assert score.reward is None
    assert "no mathematical answer" in score.error
    data, empty, fine = DataConfig(rm_type="math"), prompt(" "), prompt("12:00")
    check_labels(verifier._pool, [fine], data)
    with pytest.raises(LabelError, match="no mathematical answer"):
        check_labels(verifier._pool, [fine, empty], data)


def test_a_quotation_of_the_prompt_answers_nothing(verifier):
    asked = prompt("5", r"Write the sum of 2 and 3 like \boxed{5}.")
    quoted, answered = verifier.score([(asked, asked.text), (asked, asked.text + r" It is \boxed{5}.")])
    assert (quoted.reward, answered.reward) == (0.0, 1.0)


def test_the_last_boxes_are_found():
    assert final_boxes(r"\boxed{1} then \boxed{\frac{1}{2}} x") == [r"\frac{1}{2}"]
    assert final_boxes(r"\boxed{1} \boxed{2") == ["1"]
    assert final_boxes(r"\boxed{42} in \boxed{}") == ["42"]
    assert final_boxes(r"\boxed{a \fbox{b}}") == [r"a \fbox{b}"]
    assert final_boxes("none") == []


def disagreements(verifier: Verifier, asked: list[Pair]) -> list[tuple[str, str, str, str]]:
    """(kind, label, response, what was said of it) of all that are not judged as they were made."""
    scores = verifier.score([(prompt(pair.label, task=pair.kind), pair.response) for pair in asked])
    return [
        (pair.kind, pair.label[:80], pair.response[:120], score.error or f"reward {score.reward}")
        for pair, score in zip(asked, scores, strict=True)
        if score.reward != float(pair.is_right)
    ]


def test_answers_are_judged_as_they_were_made(verifier):
    asked = [pair for pair in pairs(1) if not pair.takes_long]
    assert len(asked) > 150
    assert disagreements(verifier, asked) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_answers_are_judged_as_they_were_made(verifier):
    asked = list(pairs(14, huge_rounds=3))
    assert len(asked) > 2000
    assert min(Counter(pair.kind for pair in asked).values()) >= 30
    assert disagreements(verifier, asked) == []


def fuzz(verifier: Verifier, count: int, seed: int) -> None:
    """Noise around a number, to labels that are fine: none is an error, and none gets lost."""
    draw = random.Random(seed)
    labels = draw.choices(["42", "\\frac{1}{2}", "x^2+1", "(1,2)", "12:00", "Monday"], k=count)
    scores = verifier.score([(prompt(label), noise(draw)) for label in labels])
    assert [score.error for score in scores if score.error is not None] == []
    assert {score.reward for score in scores} <= {0.0, 1.0}


def test_noise_is_judged_and_breaks_nothing(verifier):
    fuzz(verifier, 40, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_much_noise_is_judged_and_breaks_nothing(verifier):
    fuzz(verifier, 2000, seed=1)
