"""Verifier of mathematical answers, through the library math-verify."""

import functools
import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# math-verify asks for a time-out of one's own where its alarm signal is off; the worker pool has one
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    r"""1 if the response's answer equals the label, else 0, also where the response has no answer.

    The answer is what stands in the last `\boxed{}`, else what follows "the answer is", else the last formula
    or number. The label is a formula or number with or without `$` or `\boxed{}` around it.

    Raises:
        ValueError: the label cannot be parsed.
        whatever math-verify raises when it cannot compare the two.
    """
    answers = parse(
        last_boxed(response) or response,
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=0,
        raise_on_error=True,
    )
    return float(verify(_gold(label), answers, timeout_seconds=0, raise_on_error=True))


def extract_answer(response: str) -> str | None:
    r"""What stands in the last `\boxed{}`, else what follows the last "answer is", else the last number; None
    without any of these. Spaces and a full stop at the end are left out."""
    if boxed := last_boxed(response):
        answer = boxed[boxed.index("{") + 1 : -1]
    elif stated := re.findall(r"answer is:?\s*([^\n]+)", response, re.IGNORECASE):
        answer = stated[-1]
    else:
        answer = next(iter(re.findall(r"[-+]?\d+(?:[.,/]\d+)*", response)[-1:]), "")
    return "".join(answer.split()).rstrip(".").strip("$") or None


def last_boxed(text: str) -> str | None:
    r"""The last complete `\boxed{...}` of a text. math-verify would make a set of all of them, so that an
    intermediate result in a box spoils the final one."""
    for start in reversed([match.start() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 0
        for end in range(text.index("{", start), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start : end + 1]
    return None


@functools.lru_cache(maxsize=4096)
def _gold(label: str) -> Any:
    marked = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
    gold = parse(marked, parsing_timeout=0, raise_on_error=True)
    if not gold:
        raise ValueError(f"the label {label!r} is no mathematical answer")
    return gold
