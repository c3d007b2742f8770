"""Verifier of the tasks in `study_tasks`. It scores the final answer, and for targets also the digits."""

import re
from typing import Any

_TARGET = re.compile(r"(\d)((?:\+\d=\d+)+)#(\d+)")
_PAIR = re.compile(r"(?<!\d)(\d++[-+]\d)=(-?\d+)")


def extract_answer(response: str, metadata: dict[str, Any]) -> str | None:
    """Return the text after the last `#`, or all results of pairs; None if there is nothing."""
    if "pairs" in metadata:
        return ",".join(result for _, result in _PAIR.findall(response)) or None
    return response.rpartition("#")[2].strip() or None if "#" in response else None


def score(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """Return 1 for a right answer, 0 otherwise.

    The way to the answer counts only if the question asks for it: the digits of a target must have the
    requested number, begin with the given one and include no banned one, and pairs must be those of the
    question. Intermediate results are not checked.

    Raises:
        KeyError: the prompt is none of these tasks.
    """
    if extract_answer(response, metadata) != label:
        return 0.0
    if metadata["kind"] == "targets":
        return float(_reaches(response, metadata))
    if "pairs" in metadata:
        return float([task for task, _ in _PAIR.findall(response)] == _expressions(metadata))
    return 1.0


def _reaches(response: str, question: dict[str, Any]) -> bool:
    written = _TARGET.fullmatch(response.strip())
    if written is None:
        return False
    terms = [int(written[1]), *(int(step[1]) for step in re.findall(r"\+\d=\d+", written[2]))]
    return (
        len(terms) == question["terms"]
        and terms[0] == question["first"]
        and 0 not in terms
        and not set(terms) & set(question["banned"])
        and sum(terms) == question["target"]
    )


def _expressions(question: dict[str, Any]) -> list[str]:
    return [f"{left}{operator}{right}" for left, operator, right in question["pairs"]]
