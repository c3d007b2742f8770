"""Grading of mathematics: of answers that are right or wrong by how they were made, and of noise."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import Verifier, open_verifier
from support.answer_pairs import Pair, noise, pairs


@pytest.fixture(scope="module")
def verifier():
    data = DataConfig(rm_type="math", reward_workers=2, reward_timeout=60)  # other things run besides
    with open_verifier(data) as opened:
        yield opened
        assert opened._pool.deaths == 0


def disagreements(verifier: Verifier, asked: list[Pair]) -> list[tuple[str, str, str, str]]:
    """(kind, label, response, what was said of it) of all that are not judged as they were made."""
    prompts = [Prompt(0, token_ids([]), 0, pair.label, pair.kind, "What is it?") for pair in asked]
    scores = verifier.score([(p, pair.response) for p, pair in zip(prompts, asked, strict=True)])
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
    prompts = [
        Prompt(0, token_ids([]), 0, label, "noise", "What is it?")
        for label in draw.choices(["42", "\\frac{1}{2}", "x^2+1", "(1,2)", "12:00", "Monday"], k=count)
    ]
    scores = verifier.score([(prompt, noise(draw)) for prompt in prompts])
    assert [score.error for score in scores if score.error is not None] == []
    assert {score.reward for score in scores} <= {0.0, 1.0}


def test_noise_is_judged_and_breaks_nothing(verifier):
    fuzz(verifier, 40, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_much_noise_is_judged_and_breaks_nothing(verifier):
    fuzz(verifier, 2000, seed=1)
