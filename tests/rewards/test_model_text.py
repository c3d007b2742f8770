"""Whatever a model writes is read in time that grows with its length: no text hangs a verifier."""

import functools
import importlib
import re
import signal
import sys
import tracemalloc
from collections.abc import Callable
from itertools import chain
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as sre_parse  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

import pytest
import study_rewards

from megatron_ibpo.basics.reward_value import ResponseError
from megatron_ibpo.credit.divergence import normalised
from megatron_ibpo.credit.spans import split_spans
from megatron_ibpo.rewards import code, exact, final_answer, http_judge, math, reasoning_gym

DOORS: dict[str, Callable[[str], Any]] = {
    "math": lambda text: math.score([""], [text], ["1,2"], [{}]),
    "math, in a box": lambda text: math.score([""], [f"\\boxed{{{text}}}"], ["1,2"], [{}]),
    "math, quoted": lambda text: math.score([text[:1000]], [text], ["\\frac{1}{2}"], [{}]),
    "math's vote": math.extract_answer,
    "numbers and text": lambda text: exact.compare(text, "5"),
    "decimal comma": exact.decimal_comma,
    "place of an answer": lambda text: final_answer.answer_place(text, text[:199] + "?"),
    "code": code.extract_answer,
    "code's imports": lambda text: code.offered_imports(text[: code.LONGEST_PROGRAM]),
    "generated tasks": lambda text: reasoning_gym.extract_answer(text, {}),
    "sums": lambda text: study_rewards.score("", text, "1", SUM),
    "pairs": lambda text: study_rewards.score("", text, "1", {"kind": "pairs", "pairs": [(1, "+", 2)]}),
    "judge": lambda text: http_judge.score(text, None),
    "judge's JSON": lambda text: http_judge.score(text, "score"),
    "steps": lambda text: split_spans(list(text)),
    "steps compared": normalised,
}
"""Functions that read responses and corrections. A new verifier, or a new pattern in credit, belongs here."""
SUM: dict[str, Any] = {"kind": "targets", "terms": 2, "first": 1, "banned": [], "target": 3}
REWARDS = ("code", "exact", "final_answer", "math", "reasoning_gym", "http_judge")
MODULES = [f"megatron_ibpo.rewards.{name}" for name in REWARDS]
MODULES += ["study_rewards", "megatron_ibpo.credit.divergence", "megatron_ibpo.credit.spans"]
CHARACTERS = " \n1a,.-=`(}{\\é\x00"
BEFORE = ("answer is ", "The answer is 1,", "\\boxed{", "```", "(", "1^", "=", "\\text{", "<answer>", "1e")
LENGTH, LONGEST_S = 10_000, 0.8
"""Characters of a text, and seconds of processor time for it. What is linear takes less than 0.1 s for twice
as many; 8 ns for each pair of characters would be too much."""


def read(door: str, text: str, what: str) -> None:
    """Other threads and a garbage collection count as well, so what takes too long is read once more."""
    for again in (True, False):
        before = signal.signal(signal.SIGPROF, give_up)
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
        try:
            DOORS[door](text)
            return
        except TookTooLongError:
            assert again, f"took more than {LONGEST_S:g} s of processor time twice: {door}, {what}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


class TookTooLongError(BaseException):
    """Passes what catches every Exception."""


def give_up(*_: object) -> None:
    raise TookTooLongError


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_at_the_first_use() -> None:
    DOORS["math"]("\\(xx" * 100)


def patterns(module: ModuleType) -> list[re.Pattern[str]]:
    return [value for value in vars(module).values() if isinstance(value, re.Pattern)]


def sample(parsed: Any) -> str:
    """A text that a pattern matches in the main, by the first of its alternatives and two of what repeats."""
    text = ""
    for code_, argument in parsed:
        if code_ is op.LITERAL:
            text += chr(argument)
        elif code_ is op.NOT_LITERAL or code_ is op.ANY:
            text += "x"
        elif code_ is op.IN:
            text += one_of(argument)
        elif code_ is op.BRANCH:
            text += sample(argument[1][0])
        elif code_ in (op.SUBPATTERN, op.ATOMIC_GROUP):
            text += sample(argument[3] if code_ is op.SUBPATTERN else argument)
        elif code_ in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            text += sample(argument[2]) * max(argument[0], min(2, argument[1]))
    return text


def one_of(choices: Any) -> str:
    kind, argument = choices[0]
    if kind is op.LITERAL:
        return chr(argument)
    if kind is op.RANGE:
        return chr(argument[0])
    if kind is op.CATEGORY:
        words = {op.CATEGORY_DIGIT: "1", op.CATEGORY_SPACE: " ", op.CATEGORY_WORD: "w"}
        return words.get(argument, "!")
    return "!" if (kind, argument) == (op.NEGATE, None) else "x"


@functools.cache
def fragments() -> list[str]:
    """Beginnings of what each pattern matches, on which it starts again and again and comes to nothing."""
    made: set[str] = set()
    for pattern in chain(*(patterns(importlib.import_module(name)) for name in MODULES)):
        whole = sample(sre_parse.parse(pattern.pattern, pattern.flags & ~re.DEBUG))
        made |= {whole, whole[:-1], whole[1:], whole[: len(whole) // 2 + 1]}
    return sorted(made - {""})


def test_every_pattern_that_reads_text_is_tried():
    assert len(fragments()) > 40
    unread = {"verifier", "worker", "workers", "composite", "limits"}
    for name in {name for name in sys.modules if name.startswith("megatron_ibpo.rewards.")} - {*MODULES}:
        is_read = patterns(sys.modules[name]) and name.rpartition(".")[2] not in unread
        assert not is_read, f"{name} has patterns; name it in MODULES"


@pytest.mark.parametrize("door", DOORS)
def test_much_of_one_character_and_of_what_patterns_look_for_is_read(door):
    for character in CHARACTERS:
        read(door, character * 2 * LENGTH + "?", f"{character!r}, then an end that fits nothing")
    for fragment in (*fragments(), *BEFORE):
        read(door, fragment * (LENGTH // len(fragment)) + "?", f"{fragment!r} over and over")


NUMBERS = ",".join(map(str, range(1, 26)))
MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"


def test_lists_long_numbers_empty_sets_and_formulas_are_graded():
    for response, label, reward in (
        (f"The answer is {NUMBERS}", NUMBERS, 1.0),
        (f"The answer is {NUMBERS}", "25", 0.0),
        ("The answer is " + "7" * 800, "7", 0.0),
        ("The answer is " + "7" * 800, "7" * 800, 1.0),
        ("So it is 1, 2, 3 or 4", "1,2,3,4", 1.0),
        ("So it is 1, 2 , 3, or 4", "1,2,3,4", 1.0),
        ("So it is 1,2 or 3 or 4", "1,2,3,4", 1.0),
        ("So it is 3 or 4", "4", 0.0),
        (rf"\boxed{{({'7' * 150}.0, 1)}}", f"({'7' * 150},1)", 1.0),
        (rf"\boxed{{{'2' * 200}/{'4' * 200}}}", "1/2", {"score": 0.0, "response_error": 1.0}),
        (r"\boxed{\varnothing}", r"\emptyset", 1.0),
        (r"\boxed{∅}", r"\varnothing", 1.0),
        (r"\boxed{\text{No solutions}}", "no solution", 1.0),
        (r"\boxed{\text{no real solutions}}", r"\text{No real solution}", 1.0),
        (r"\boxed{\text{solutions}}", "no solution", 0.0),
        (r"\boxed{\text{YES}}", "yes", 1.0),
        (r"\boxed{(1+x)^{500}}", "(2+x)^{500}", 0.0),  # of quite another value: it would take seconds in vain
        (rf"\boxed{{{MATRIX} + {MATRIX}}}", f"{MATRIX}+{MATRIX}", 1.0),  # left to math-verify
    ):
        assert math.score([""], [response], [label], [{}]) == [reward]


def test_boxes_within_boxes_take_no_more_memory_than_the_text():
    nested = "\\boxed{" * 30_000 + "7" + "}" * 30_000
    tracemalloc.start()
    assert len(final_answer.final_boxes(nested)[0]) == len(nested) - len("\\boxed{}")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60e6, "each box as a text of its own would take 7 GB"


def test_a_program_longer_than_any_is_wrong_and_counted_and_never_parsed_here():
    program = "x = [" + "1, " * code.LONGEST_PROGRAM + "]"
    label = '{"inputs": [""], "outputs": ["1"]}'
    with pytest.raises(ResponseError, match=r"a program of 600,007 characters; more than 200,000"):
        code.score("", f"```python\n{program}\n```", label, {})
    assert code.extract_answer(program) is None, "unfenced text of any length is no program"
