"""Labels that are lists or objects: the accepted answers, or refused before work starts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import LabelError, check_labels, label_problems, open_verifier
from megatron_ibpo.rewards.labels import ANSWER_KEYS, accepted_answers
from megatron_ibpo.rewards.math import is_right

DATA = DataConfig(rm_type="math", reward_workers=1, reward_timeout=60)


def prompt(label, index=0):
    return Prompt(index, token_ids([]), 0, label, "math", "What is it?")


@pytest.fixture(scope="module")
def verifier():
    with open_verifier(DATA) as opened:
        yield opened


UNDERSTOOD = {  # label → answers that are right, and that are wrong
    '["5", "five"]': (["5", "five", "5.0", "5 or five", '["5", "five"]'], ["6", "5 or 6", "fifth"]),
    '["1,2"]': (["1,2", "(1,2)"], ["1", "2", "12", "2,1,3"]),
    '{"target": ["William Shakespeare"]}': (["William Shakespeare", "william shakespeare"], ["Shakespeare"]),
    '["\\\\frac{1}{2}", 0.25]': (["0.5", r"\frac{2}{4}", "1/4"], ["0.125"]),
    '{"ground_truth": {"target": ["a cat", "the cat"]}, "style": "rule"}': (["the cat", "a cat"], ["a dog"]),
    '{"target": 98, "numbers": null}': (["98"], ["9"]), '{"answer": [5, 6]}': (["5", "6"], ["5,6", "7"]),
    "['5', 'five']": (["five"], ["six"]), "{'target': ['it\\'s']}": (["it's"], ["is"]),
    r'["\frac{1}{2}"]': (["0.5"], ["1"]), r"['\theta', '\sqrt{2}']": ([r"\theta", r"\sqrt{2}"], ["2"]),
    '"five"': (["five", '"five"'], ["six"]), '"[\\"5\\"]"': (["5"], ["6"]),
    "[1, 2]": (["[1,2]", "[1, 2]"], ["1", "2", "(1,2)", "[1,3]"]), "[5]": (["5", "[5]"], ["6"]),
    '["[1, 2]"]': (["[1,2]"], ["1"]), "[[1,2],[3,4]]": (["[[1,2],[3,4]]"], ["[1,2]"]),
    "[0, 1)": (["[0,1)"], ["[0,1]"]), r"\{1, 2\}": ([r"\{1,2\}", r"\{2,1\}"], ["1"]),
    "[f'(x), 2]": (["[f'(x), 2]"], ["2"]), "true": (["true", "True"], ["false"]), "5": (["5"], ["6"]),
}  # fmt: skip


def test_a_list_label_accepts_its_answers_and_objects_their_content(verifier):
    cases = [
        (label, answer, wanted)
        for label, (right, wrong) in UNDERSTOOD.items()
        for wanted, answers in ((1.0, right), (0.0, wrong))
        for answer in answers
    ]
    pairs = [(prompt(label), f"So it is $\\boxed{{{answer}}}$.") for label, answer, _ in cases]
    wrongly = [
        (case, score)
        for case, score in zip(cases, verifier.score(pairs), strict=True)
        if score.reward != case[2]
    ]
    assert wrongly == []
    assert label_problems(verifier._pool, list(map(prompt, UNDERSTOOD)), DATA) == []


def test_other_label_structures_are_refused_with_prompt_and_advice(verifier):
    refused = {
        "null": "it is null", "[]": "an empty list", "{}": "an object with no keys",
        "[null]": "with null in it", "[true]": "with true in it", '{"answer": true}': "it is or holds true",
        '["", "5"]': "layout only",
        '[["a", "b"]]': "a list with a list in it", '[{"answer": "5"}]': "with an object in it",
        '{"target": 98, "numbers": [44, 19]}': "an object with 'target', 'numbers'; one with a single key",
        '{"x": "5"}': "an object with 'x'", '["a"': "neither JSON nor Python",
        "['a' 'b']": "neither JSON nor Python", "{'target': array(['a'], dtype=object)}": "neither JSON",
        '{"answer": {"answer": {"answer": {"answer": ["5"]}}}}': "nested too deeply",
        "[" * 9999: "nested too deeply",
        "[" * 400 + '"5"' + "]" * 400: "nested too deeply",
        "['5', 0x" + "f" * 9999 + "]": "neither JSON nor Python",  # Python writes no number of so many digits
        json.dumps(["5"] * 1001): "a list of 1,001 answers",
    }  # fmt: skip
    for index, (label, says) in enumerate(refused.items()):
        with pytest.raises(LabelError) as error:
            check_labels(verifier._pool, [prompt("5"), prompt(label, index)], DATA)
        first, line = str(error.value).split("\n")
        assert first == "1 label of the first 2 cannot be graded:", label
        assert line.strip().startswith(f"math, prompt {index}, label "), label
        assert says in line, (label, line)
    scores = verifier.score([(prompt(label), r"\boxed{5}") for label in refused])
    assert {score.reward for score in scores} == {None}


TEXTS = st.text("abcdefgh0123456789", min_size=1, max_size=6)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(ANSWER_KEYS), st.data())
def test_each_answer_of_a_list_is_right_in_every_form(answers, key, data):
    answer = data.draw(st.sampled_from(answers))
    for label in (
        json.dumps(answers),
        str(answers),
        json.dumps({key: answers}),
        json.dumps(json.dumps(answers)),
    ):
        assert set(accepted_answers(label)) == set(answers), label
        assert is_right(rf"\boxed{{{answer}}}", label), label


@given(
    st.text(max_size=40).filter(
        lambda text: (text.strip() != "null" and text.strip()[:1] not in '[{"') or not text
    )
)
def test_a_label_that_is_no_structure_is_its_only_answer(label):
    assert accepted_answers(label) == (label,)
