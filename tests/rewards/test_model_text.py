"""Whatever a model writes is read in time that grows with its length: no text hangs a verifier."""

import re
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from re import _parser as sre_parse  # type: ignore[attr-defined]
from typing import Any

import pytest
import study_rewards

from megatron_ibpo.basics.reward_value import LabelError, ResponseError
from megatron_ibpo.credit import divergence, pairing
from megatron_ibpo.rewards import (
    code,
    exact,
    http_wires,
    labels,
    math,
    reasoning_gym,
    response,
)
from megatron_ibpo.rewards.http_wires import Question


def labels_read(text):
    for label in (text, f"['{text}", f'["{text}"]'):
        with suppress(LabelError):
            labels.accepted_answers(label)


SUM: dict[str, Any] = {"kind": "targets", "terms": 2, "first": 1, "banned": [], "target": 3}
DOORS: dict[str, Callable[[str], Any]] = {
    "math": lambda text: math.score([""], [text], ["1,2"], [{}]),
    "math, in a box": lambda text: math.score([""], [f"\\boxed{{{text}}}"], ["1,2"], [{}]),
    "math, quoted": lambda text: math.score([text[:1000]], [text], ["\\frac{1}{2}"], [{}]),
    "math's vote": math.extract_answer,
    "numbers and text": lambda text: exact.compare(text, "5"),
    "decimal comma": exact.decimal_comma,
    "place of an answer": lambda text: response.answer_place(text, text[:199] + "?"),
    "code": code.extract_answer,
    "code's imports": lambda text: code.offered_imports(text[: code.LONGEST_PROGRAM]),
    "generated tasks": lambda text: reasoning_gym.extract_answer(text, {}),
    "sums": lambda text: study_rewards.score("", text, "1", SUM),
    "pairs": lambda text: study_rewards.score("", text, "1", {"kind": "pairs", "pairs": [(1, "+", 2)]}),
    "thinking": response.after_thinking,
    "thinking of a prompt": response.open_at_end,
    "label": labels_read,
    "judge's question": lambda text: http_wires._fill_template("{{response}}", Question("", text, ""), None),
    "judge": lambda text: http_wires.judged_score(text, None),
    "judge's JSON": lambda text: http_wires.judged_score(text, "score"),
    "steps": lambda text: pairing.split_spans(list(text)),
    "steps compared": divergence.normalised,
}
"""Functions that read responses and corrections. A new verifier, or a new pattern in credit, belongs here."""
MODULES = [
    code,
    exact,
    http_wires,
    labels,
    math,
    reasoning_gym,
    response,
    divergence,
    pairing,
    study_rewards,
]


SAMPLES: dict[str, Callable[..., str]] = {
    "LITERAL": chr, "RANGE": lambda bounds: chr(bounds[0]), "NEGATE": lambda _: "!",
    "CATEGORY": lambda of: {"DIGIT": "1", "SPACE": " ", "WORD": "w"}.get(of.name[len("CATEGORY_") :], "!"),
    **dict.fromkeys(["ANY", "NOT_LITERAL"], lambda _: "x"), "IN": lambda choices: sample(choices[:1]),
    "BRANCH": lambda ways: sample(ways[1][0]), "SUBPATTERN": lambda group: sample(group[3]),
    "ATOMIC_GROUP": lambda inside: sample(inside),
    **dict.fromkeys(
        ["MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"],
        lambda repeat: sample(repeat[2]) * max(repeat[0], min(2, repeat[1])),
    ),
}  # fmt: skip


def sample(parsed):
    """A text that a pattern matches in the main, by the first of its alternatives and two of what repeats."""
    return "".join(SAMPLES.get(kind.name, lambda _: "")(argument) for kind, argument in parsed)


@pytest.fixture(scope="module")
def fragments():
    """Beginnings of what each pattern matches, on which it starts again and again and comes to nothing."""
    made = {"answer is ", "The answer is 1,", "\\boxed{", "```", "(", "1^", "=", "\\text{", "<answer>", "1e"}
    for pattern in (
        one for module in MODULES for one in vars(module).values() if isinstance(one, re.Pattern)
    ):
        whole = sample(sre_parse.parse(pattern.pattern, pattern.flags & ~re.DEBUG))
        made |= {whole, whole[:-1], whole[1:], whole[: len(whole) // 2 + 1]}
    assert len(made) > 40
    return sorted(made - {""})


MOST_STEPS = {"math": 3e8}
"""Steps that a door may take for one text where it parses formulas; all others, `FEW_STEPS`."""
FEW_STEPS = 1e8
"""Half of what the cheapest pattern that looks at each pair of 20,000 characters takes."""


@pytest.fixture(scope="module")
def steps_of():
    """Processor time in steps: one is that of `x*y`, which looks at each pair of characters where no y
    comes."""
    times = []
    for _ in range(3):
        start = time.process_time()
        assert re.search("x*y", "x" * 10_000) is None
        times.append(time.process_time() - start)
    return lambda seconds: seconds / (min(times) / (10_000**2 / 2))


@pytest.mark.parametrize(
    "door", [pytest.param(door, marks=pytest.mark.slow if door == "math, in a box" else ()) for door in DOORS]
)
def test_repeated_characters_and_pattern_parts_are_read(door, fragments, steps_of):
    DOORS[door]("\\(xx" * 100)  # which imports what is needed at the first use
    texts = [character * 20_000 + "?" for character in " \n1a,.-=`(}{\\é\x00"]
    texts += [fragment * (10_000 // len(fragment)) + "?" for fragment in fragments]
    for text in texts:
        for is_last in (False, True):  # other threads and a garbage collection count as well
            start = time.process_time()
            DOORS[door](text)
            if (steps := steps_of(time.process_time() - start)) < MOST_STEPS.get(door, FEW_STEPS):
                break
            assert not is_last, f"{text[:30]!r} over and over took {steps:.1e} steps"


def test_a_quadratic_pattern_exceeds_the_step_bound(steps_of):
    start = time.process_time()
    assert re.search("x*y", "x" * 20_000) is None
    assert steps_of(time.process_time() - start) > FEW_STEPS


def test_boxes_within_boxes_take_no_more_memory_than_the_text():
    nested = "\\boxed{" * 30_000 + "7" + "}" * 30_000
    tracemalloc.start()
    assert len(response.final_boxes(nested)[0]) == len(nested) - len("\\boxed{}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60e6, "each box as a text of its own would take 7 GB"


def test_an_overlong_program_is_wrong_and_never_parsed_here():
    program = "x = [" + "1, " * code.LONGEST_PROGRAM + "]"
    label = '{"inputs": [""], "outputs": ["1"]}'
    with pytest.raises(ResponseError, match=r"a program of 600,007 characters; more than 200,000"):
        code.score("", f"```python\n{program}\n```", label, {})
    assert code.extract_answer(program) is None, "unfenced text of any length is no program"
