"""The suite's own tasks: what is asked, what is right, and what a student makes of it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_rewards import score
from study_tasks import STUDY_TASKS, Noise, pairs, steps_of
from tiny_tokenizer import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
TARGET = {"target": 31, "terms": 5, "first": 5, "banned": [4, 7]}
SUMS = {"pairs": [[38, "+", 7], [91, "-", 5], [26, "+", 1], [40, "-", 8]]}
CHAIN = {"left": 47, "right": 52, "terms": [3, 8, 1, 9, 4, 2, 6, 5]}


def judged(kind, question, response):
    task = STUDY_TASKS[kind]
    return score(task.text(question), response, task.label(question), {"kind": kind, **question})


@pytest.mark.parametrize(("kind", "question", "response", "reward"), [
    ("targets", TARGET, "5+8=13+9=22+6=28+3=31#31", 1),
    ("targets", TARGET, "5+8=13+9=22+6=29+3=31#31", 1),  # the digits do it; a result between is wrong
    ("targets", TARGET, "5+7=12+9=21+6=27+4=31#31", 0),  # banned digits
    ("targets", TARGET, "6+8=14+9=23+6=29+2=31#31", 0),  # another first digit
    ("targets", TARGET, "5+8=13+9=22+6=28+2=31#31", 0),  # they come to 30
    ("targets", TARGET, "5+8=13+9=22+6=28+3=31", 0),  # no answer
    ("targets", {**TARGET, "target": 26}, "5+9=14+9=23+0=23+3=26#26", 0),  # 0 is no such digit
    ("pairs", SUMS, "38+7=35,91-5=86,26+1=27,40-8=32", 0),
    ("pairs", SUMS, "38+7=45,91-5=86,26+1=27,30+2=32", 0),  # of another question
    ("rule", CHAIN, "80-3=77-8=69-1=68-9=59-4=55-2=53-6=47-5=42#42", 0),
    ("rule", {**CHAIN, "left": 61}, "80-3=77-8=69-1=68-9=59-4=55-2=53-6=47-5=42#42", 1),
])  # fmt: skip
def test_a_response_is_judged_by_its_answer(kind, question, response, reward):
    assert judged(kind, question, response) == reward


@pytest.mark.parametrize("kind", STUDY_TASKS)
@given(seed=st.integers(0, 10**6))
def test_a_student_without_misconception_or_of_full_skill_is_right(kind, seed):
    task, rng, noise = STUDY_TASKS[kind], random.Random(seed), Noise(misconception=0.9, slip=0.1)
    question = task.draw(rng)
    steps = task.solution(question, rng, Noise())
    assert judged(kind, question, "".join(steps)) == 1
    assert steps_of("".join(steps)) == steps
    assert [task.mended(question, steps[:place], step) for place, step in enumerate(steps)] == steps
    candidate, mended = task.solution(question, rng, noise), []
    assert TOKENIZER.unk_token_id not in TOKENIZER(task.text(question) + "".join(candidate))["input_ids"]
    for step in candidate:
        mended.append(task.mended(question, mended, step))
    assert judged(kind, question, "".join(mended)) == 1
    assert task.mended_solution(question, candidate, rng, noise, skill=0.0) == candidate
    compared = task.mended_solution(question, candidate, rng, noise, skill=1.0)
    assert judged(kind, question, "".join(compared)) == 1


def test_the_splits_share_no_question_and_never_change():
    training, held_out = pairs("train"), pairs("eval")
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}
    assert training == pairs("train")
    assert (len(training), len(held_out)) == (2048, 1024)
