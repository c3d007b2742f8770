"""Tasks of the suite of studies beside chain_sum: questions, and students that answer them badly.

    --prompt-data import://examples/tasks/study_tasks.py:targets
    --rm-type examples/tasks/study_rewards.py:score

Each poses a different credit problem (docs/studies.md). A student writes a solution step by step and has a
misconception, which a warm start plants and reinforcement can remove.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from worked_solutions import carries, worked_solution

Question = dict[str, Any]
"""Parts of a question; also the metadata of its prompt."""

QUESTIONS = {"train": 2048, "eval": 1024}
"""Different questions in each split: about as many as a run of the studies uses."""

_STEP = re.compile(r"[^=]*=-?\d+|.+", re.DOTALL)
"""An equation up to its result; the rest of the text is one more step."""
_DIGITS = frozenset(range(1, 10))


@dataclass(frozen=True)
class Noise:
    """Rates of a student's errors."""

    misconception: float = 0.0
    """Probability that the task's misconception acts where it can."""
    slip: float = 0.0
    """Probability that another result is off by one or two."""


_NO_NOISE = Noise()


@dataclass(frozen=True)
class StudyTask:
    """A kind of question, and the student that answers it."""

    draw: Callable[[random.Random], Question]
    text: Callable[[Question], str]
    """Return the prompt."""
    label: Callable[[Question], str]
    """Return the final answer."""
    next_step: Callable[[Question, Sequence[str], random.Random, Noise], str]
    """(question, steps so far, random generator, noise) → the student's next step; empty at the end."""
    mended: Callable[[Question, Sequence[str], str], str]
    """(question, steps so far, step) → the right step after those: the given one if it is right, otherwise
    one with as many of its free choices as possible."""

    def solution(
        self, question: Question, rng: random.Random, noise: Noise, prefix: Sequence[str] = ()
    ) -> list[str]:
        """Return the steps of one student that continues after `prefix`. Joined, they form the text."""
        steps = list(prefix)
        while step := self.next_step(question, steps, rng, noise):
            steps.append(step)
        return steps

    def mended_solution(
        self, question: Question, candidate: Sequence[str], rng: random.Random, noise: Noise, skill: float
    ) -> list[str]:
        """Return the steps of a student that compares, after seeing those of a candidate.

        The student copies right steps. At a wrong one the student writes the right one with probability
        `skill`. Otherwise the student copies it or, after an earlier change, continues alone.
        """
        written: list[str] = []
        for tried in candidate:
            right = self.mended(question, written, tried)
            if tried == right or rng.random() < skill:
                written.append(right)
            elif written == list(candidate[: len(written)]):
                written.append(tried)
            else:
                written.append(self.next_step(question, written, rng, noise))
        return written


def steps_of(text: str) -> list[str]:
    """Cut a written solution into steps: `5+8=13+9=22#22` into `5+8=13`, `+9=22`, `#22`."""
    return _STEP.findall(text)


def questions(task: StudyTask, split: str, rng: random.Random) -> Iterator[Question]:
    """Yield questions of a split without end. A hash of its text puts each question into one split.

    Args:
        split: train or eval.
    """
    while True:
        question = task.draw(rng)
        if _held_out(task.text(question)) == (split == "eval"):
            yield question


def rows(task: StudyTask, name: str, split: str) -> list[dict[str, Any]]:
    """Return different questions as rows of data, the same in every call.

    Args:
        name: name of the task, for the rows.
        split: train or eval.
    """
    question_by_text: dict[str, Question] = {}
    for question in questions(task, split, random.Random(f"{name} {split}")):
        question_by_text[task.text(question)] = question
        if len(question_by_text) == QUESTIONS[split]:
            break
    return [
        {"prompt": text, "label": task.label(question), "task": name, "metadata": {"kind": name, **question}}
        for text, question in question_by_text.items()
    ]


def _held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] < 128


# ------------------------------------------------------------------ targets: the correct texts are many


def _draw_target(rng: random.Random) -> Question:
    """Draw a sum to reach with five or six digits; the first is given, and two are banned."""
    while True:
        banned = sorted(rng.sample(range(1, 10), 2))
        terms, first = rng.choice((5, 6)), rng.choice(sorted(_DIGITS - set(banned)))
        target = rng.randint(3 * terms, 7 * terms)
        if target - first in _reachable(terms - 1, _DIGITS - set(banned)):
            return {"target": target, "terms": terms, "first": first, "banned": banned}


def _target_text(question: Question) -> str:
    """Return, for example, `31=5+?+?+?+?|47`: five digits with the sum 31, the first 5, none 4 or 7."""
    banned = "".join(map(str, question["banned"]))
    return f"{question['target']}={question['first']}{'+?' * (question['terms'] - 1)}|{banned}\n"


def _next_of_target(question: Question, steps: Sequence[str], rng: random.Random, noise: Noise) -> str:
    """Write a digit. Under the misconception the student forgets at this step which digits are banned."""
    if steps and steps[-1].startswith("#"):
        return ""
    total, remaining = _of_target(question, steps)
    if remaining == 0:
        return f"#{total}"
    allowed = _DIGITS if rng.random() < noise.misconception else _DIGITS - set(question["banned"])
    term = rng.choice(_choices(question["target"] - total, remaining, allowed))
    return _addition(question, steps, term, _computed(total, "+", term, rng, Noise(slip=noise.slip)))


def _mended_of_target(question: Question, steps: Sequence[str], step: str) -> str:
    total, remaining = _of_target(question, steps)
    if remaining == 0:
        return f"#{total}"
    choices = _choices(question["target"] - total, remaining, _DIGITS - set(question["banned"]))
    tried = _term(step)
    term = min(choices, key=lambda choice: (abs(choice - tried), choice))
    return _addition(question, steps, term, total + term)


def _of_target(question: Question, steps: Sequence[str]) -> tuple[int, int]:
    """Return (the sum as written so far, the number of digits still to come)."""
    return (_result(steps[-1]) if steps else question["first"]), question["terms"] - 1 - len(steps)


def _addition(question: Question, steps: Sequence[str], term: int, total: int) -> str:
    return f"{'' if steps else question['first']}+{term}={total}"


def _choices(total: int, remaining: int, allowed: frozenset[int]) -> list[int]:
    """Return the digits after which `total` can still be reached with `remaining` of the allowed ones. If it
    can no longer be reached, return the digit that comes nearest with even steps."""
    choices = [digit for digit in sorted(allowed) if total - digit in _reachable(remaining - 1, allowed)]
    return choices or [min(sorted(allowed), key=lambda digit: abs(digit * remaining - total))]


@cache
def _reachable(count: int, allowed: frozenset[int]) -> frozenset[int]:
    """Return all sums of `count` allowed digits."""
    if count == 0:
        return frozenset({0})
    return frozenset(subtotal + digit for subtotal in _reachable(count - 1, allowed) for digit in allowed)


TARGETS = StudyTask(
    _draw_target,
    _target_text,
    lambda question: str(question["target"]),
    _next_of_target,
    _mended_of_target,
)


# ------------------------------------------------------------------ pairs: errors are not copied onward


def _draw_pairs(rng: random.Random) -> Question:
    """Draw four independent sums and differences of a two-digit number and a digit."""
    return {"pairs": [[rng.randint(10, 99), rng.choice("+-"), rng.randint(1, 9)] for _ in range(4)]}


def _pairs_text(question: Question) -> str:
    """Return, for example, `38+7,91-5,26+9,44-8`."""
    return ",".join(f"{left}{operator}{right}" for left, operator, right in question["pairs"]) + "\n"


def _next_of_pairs(question: Question, steps: Sequence[str], rng: random.Random, noise: Noise) -> str:
    """Write a pair. Under the misconception carries and borrows are dropped."""
    if len(steps) == len(question["pairs"]):
        return ""
    left, operator, right = question["pairs"][len(steps)]
    result = _computed(left, operator, right, rng, noise)
    return _pair(question, len(steps), result)


def _mended_of_pairs(question: Question, steps: Sequence[str], step: str) -> str:
    left, operator, right = question["pairs"][len(steps)]
    return _pair(question, len(steps), _computed(left, operator, right))


def _pair(question: Question, place: int, result: int) -> str:
    left, operator, right = question["pairs"][place]
    return f"{',' if place else ''}{left}{operator}{right}={result}"


def _pairs_label(question: Question) -> str:
    results = [_computed(*pair) for pair in question["pairs"]]
    return ",".join(map(str, results))


PAIRS = StudyTask(_draw_pairs, _pairs_text, _pairs_label, _next_of_pairs, _mended_of_pairs)


# ------------------------------------------------------ late: long texts whose errors lie at the end


def _draw_late(rng: random.Random) -> Question:
    """Draw eight pairs; only the last three have a carry or a borrow, where the misconception acts."""
    early = [_draw_pair(rng, with_carry=False) for _ in range(5)]
    return {"pairs": early + [_draw_pair(rng, with_carry=True) for _ in range(3)]}


def _draw_pair(rng: random.Random, *, with_carry: bool) -> list[Any]:
    while True:
        left, operator, right = rng.randint(20, 89), rng.choice("+-"), rng.randint(1, 9)
        if carries(left, operator, right) == with_carry:
            return [left, operator, right]


LATE = StudyTask(_draw_late, _pairs_text, _pairs_label, _next_of_pairs, _mended_of_pairs)


# --------------------------------------------------------- carries: sums whose students seldom get through


def _draw_carries(rng: random.Random) -> Question:
    """Draw a chain of seven digits with four carries or borrows."""
    while True:
        terms = [rng.randint(1, 9) for _ in range(7)]
        operators = [rng.choice("+-") for _ in terms[1:]]
        value, num_carries = terms[0], 0
        for operator, term in zip(operators, terms[1:], strict=True):
            num_carries += carries(value, operator, term)
            value += term if operator == "+" else -term
        if num_carries == 4:
            return {"terms": terms, "operators": operators}


def _carries_text(question: Question) -> str:
    """Return the question as chain_sum asks it, without spaces, such as `… problem: 5+8-3+9+4-8+7=`."""
    pairs = zip(question["operators"], question["terms"][1:], strict=True)
    rest = "".join(f"{operator}{term}" for operator, term in pairs)
    return f"State the final answer to the following arithmetic problem: {question['terms'][0]}{rest}=\n"


def _carries_label(question: Question) -> str:
    terms, operators = question["terms"], question["operators"]
    signed = zip(operators, terms[1:], strict=True)
    return str(terms[0] + sum(term if operator == "+" else -term for operator, term in signed))


def _next_of_carries(question: Question, steps: Sequence[str], rng: random.Random, noise: Noise) -> str:
    """Write a link. Under the misconception carries and borrows are dropped."""
    return _carries_step(question, steps, rng, noise)


def _mended_of_carries(question: Question, steps: Sequence[str], step: str) -> str:
    return _carries_step(question, steps)


def _carries_step(
    question: Question, steps: Sequence[str], rng: random.Random | None = None, noise: Noise = _NO_NOISE
) -> str:
    place = len(steps)
    if place == len(question["operators"]):
        return f"#{_result(steps[-1])}"
    if place > len(question["operators"]):
        return ""
    total = _result(steps[-1]) if steps else question["terms"][0]
    operator, term = question["operators"][place], question["terms"][place + 1]
    start = "" if steps else question["terms"][0]
    return f"{start}{operator}{term}={_computed(total, operator, term, rng, noise)}"


CARRIES = StudyTask(_draw_carries, _carries_text, _carries_label, _next_of_carries, _mended_of_carries)


# ------------------------------------------------------------------ rule: a prefix decides a long chain

_RULE_START, _RULE_TERMS = 80, 8


def _draw_rule(rng: random.Random) -> Question:
    """Draw two numbers, which decide whether eight digits are added to 80 or subtracted from it."""
    left, right = rng.sample(range(10, 100), 2)
    return {"left": left, "right": right, "terms": [rng.randint(1, 9) for _ in range(_RULE_TERMS)]}


def _rule_text(question: Question) -> str:
    """Return, for example, `47?52|3,8,1,9,4,2,6,5`: added where the first number is the smaller one."""
    terms = ",".join(map(str, question["terms"]))
    return f"{question['left']}?{question['right']}|{terms}\n"


def _next_of_rule(question: Question, steps: Sequence[str], rng: random.Random, noise: Noise) -> str:
    """Write a link. Under the misconception numbers are compared by their last digits."""
    if len(steps) > _RULE_TERMS:
        return ""
    total = _result(steps[-1]) if steps else _RULE_START
    if len(steps) == _RULE_TERMS:
        return f"#{total}"
    sign = _written_sign(steps)
    if sign is None:
        left, right = question["left"], question["right"]
        if rng.random() < noise.misconception:
            left, right = left % 10, right % 10
        sign = "+" if left < right else "-"
    term = question["terms"][len(steps)]
    return _link(steps, sign, term, _computed(total, sign, term, rng, Noise(slip=noise.slip)))


def _mended_of_rule(question: Question, steps: Sequence[str], step: str) -> str:
    """Return the right step. The first step fixes the sign of all later ones, right or wrong."""
    total = _result(steps[-1]) if steps else _RULE_START
    if len(steps) == _RULE_TERMS:
        return f"#{total}"
    sign = _written_sign(steps) or _right_sign(question)
    term = question["terms"][len(steps)]
    return _link(steps, sign, term, _computed(total, sign, term))


def _right_sign(question: Question) -> Literal["+", "-"]:
    return "+" if question["left"] < question["right"] else "-"


def _written_sign(steps: Sequence[str]) -> str | None:
    return steps[0][len(str(_RULE_START))] if steps else None


def _link(steps: Sequence[str], sign: str, term: int, total: int) -> str:
    return f"{'' if steps else _RULE_START}{sign}{term}={total}"


def _rule_label(question: Question) -> str:
    sign = 1 if _right_sign(question) == "+" else -1
    return str(_RULE_START + sign * sum(question["terms"]))


RULE = StudyTask(_draw_rule, _rule_text, _rule_label, _next_of_rule, _mended_of_rule)


# ------------------------------------------------------------------------------------------ all of them

STUDY_TASKS = {"targets": TARGETS, "pairs": PAIRS, "late": LATE, "carries": CARRIES, "rule": RULE}


def targets(split: str) -> list[dict[str, Any]]:
    """Return rows of sums to reach: many texts are correct."""
    return rows(TARGETS, "targets", split)


def pairs(split: str) -> list[dict[str, Any]]:
    """Return rows of independent sums: errors are not copied onward."""
    return rows(PAIRS, "pairs", split)


def late(split: str) -> list[dict[str, Any]]:
    """Return rows of longer lists of sums: the last three are the ones that go wrong."""
    return rows(LATE, "late", split)


def sums_with_carries(split: str) -> list[dict[str, Any]]:
    """Return rows of chains with four carries: a student that drops carries seldom gets through."""
    return rows(CARRIES, "carries", split)


def rule(split: str) -> list[dict[str, Any]]:
    """Return rows of long chains whose first step decides."""
    return rows(RULE, "rule", split)


def _computed(
    left: int, operator: str, right: int, rng: random.Random | None = None, noise: Noise = _NO_NOISE
) -> int:
    """Return the result of one step by a student of chain_sum, whose misconception is to drop carries;
    without `rng`, the right result."""
    written = worked_solution(
        f"{left} {operator} {right}", rng, carry_dropped=noise.misconception, slip=noise.slip
    )
    return int(written.rpartition("#")[2])


def _term(step: str) -> int:
    """Return the digit that a step adds."""
    return int(step.partition("=")[0].rpartition("+")[2])


def _result(step: str) -> int:
    """Return the result of a step."""
    return int(step.rpartition("=")[2])
