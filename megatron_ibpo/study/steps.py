"""Where the steps of a written solution end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["step_boundaries"]

_STEP_END = re.compile(
    r"=\s*[-+]?\d[\d.,/]*(?<![.,/])"  # the result of a calculation
    r"|[.!?](?=\s)"  # a sentence
    r"|\n+"
)


def step_boundaries(token_texts: Sequence[str]) -> list[int]:
    """Numbers of tokens after which a step is complete, from 0 (nothing written) to all of them.

    A step ends with the result of a calculation, a sentence or a line; the last one with the text. A token
    that holds the end of one step and the beginning of the next belongs to the first.
    """
    ends = list(accumulate(map(len, token_texts)))
    found = {0, len(token_texts)}
    token = 0
    for match in _STEP_END.finditer("".join(token_texts)):
        while ends[token] < match.end():
            token += 1
        found.add(token + 1)
    return sorted(found)
