"""Solutions and their parts: the responses that a wrong one is compared with (ibpo step 3), the part of each
that a correction prompt shows and that is compared (ibpo step 4), and the steps of a written solution."""

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Correction, Flags, Group, Sample, TokenIds, token_ids

Indices = npt.NDArray[np.intp]
Ragged = tuple[TokenIds, npt.NDArray[np.int64]]
"""(values, offsets) of several parts, in the form that megatron_ibpo.edit_distance takes."""


_ENDS = re.compile(
    r"\n+"
    r"|(?<![.!?;])[.!?;]++(?=\s|$)"  # end of a sentence; not a decimal point
    r"|=\s*+(?:[-+]\s*+)?(?:[$€£]\s*+)?\d++(?:[.,]\d++)*+"  # end of a calculation: its result
)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a response's tokens."""

    ids: TokenIds
    places: Indices | None
    """Index of each token in the response; None if the part is the whole content."""


@dataclass(frozen=True)
class ThinkingMarks:
    """Token ids of <think> and </think>."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ComparedPairs:
    """Every correction of a step with its target, in the form for comparison."""

    members: list[tuple[Group, Correction]]
    targets: list[Part]
    y: Ragged
    """Compared parts of the targets."""
    y_hat: Ragged
    """Compared parts of the corrections."""


def is_wrong(response: Sample) -> bool:
    """Return whether a response is scored and not correct. It is neither right nor wrong if its verifier
    failed."""
    return response.reward is not None and not response.correct


def draw_references(
    target: int, responses: Sequence[Sample], count: int, rng: random.Random
) -> tuple[int, ...]:
    """Draw `count` = K-1 references for the wrong response `target`, as indices into `responses`.

    Uniform over the correct responses, or over the other wrong ones if none is correct. Responses whose
    verifier failed are never references. Empty if there is no other response: K falls to 1.
    """
    pool = [i for i, response in enumerate(responses) if response.correct]
    if not pool:
        pool = [i for i, response in enumerate(responses) if is_wrong(response) and i != target]
    return draw(pool, count, rng)


def draw(pool: Sequence[int], count: int, rng: random.Random) -> tuple[int, ...]:
    """Draw `count` items of the pool, none twice before all were drawn. Empty for an empty pool."""
    drawn: list[int] = []
    while pool and len(drawn) < count:
        drawn += rng.sample(pool, min(len(pool), count - len(drawn)))
    return tuple(drawn)


def part_in_prompt(response: Sample, marks: ThinkingMarks | None) -> Part:
    """Return the part of a response that a correction prompt shows: all but the end-of-sequence id. Given
    marks, thinking is left out too, marks included.

    If the last mark in the prompt is an opening one, the response starts inside thinking. Thinking that is
    never closed is hidden to its end; a closing mark that nothing opened hides everything before it.
    """
    if marks is None:
        return Part(response.content_ids, None)
    return _part(response, _outside_thinking(response, marks))


def compared(response: Sample, marks: ThinkingMarks | None) -> Part:
    """Return the tokens of the shown part that the policy wrote. Tool output is left out, so that output
    shared by two solutions brings them no nearer."""
    if response.num_trained_tokens == len(response.token_ids):
        return part_in_prompt(response, marks)
    written = response.loss_mask[: response.num_content_tokens]
    return _part(response, written if marks is None else written & _outside_thinking(response, marks))


def compared_pairs(groups: Sequence[Group], marks: ThinkingMarks | None) -> ComparedPairs:
    """Return the parts to compare for all corrections. Called once for all comparisons, since joining the
    tokens takes as long as finding a few edits."""
    members = [(group, correction) for group in groups for correction in group.corrections]
    targets = [compared(group.responses[c.target], marks) for group, c in members]
    corrected = [compared(c.response, marks) for _, c in members]
    return ComparedPairs(members, targets, _join(targets), _join(corrected))


def _part(response: Sample, keep: Flags) -> Part:
    places = np.flatnonzero(keep)
    return Part(response.content_ids[places], places)


def _join(parts: Sequence[Part]) -> Ragged:
    offsets = np.cumsum([0, *(len(part.ids) for part in parts)], dtype=np.int64)
    return np.concatenate([part.ids for part in parts] or [token_ids([])]), offsets


def _outside_thinking(response: Sample, marks: ThinkingMarks) -> Flags:
    """Return which tokens of the content lie outside thinking."""
    content = response.content_ids
    prompt_marks = _marks_in(response.prompt_token_ids, marks)
    starts_inside = bool(prompt_marks) and not prompt_marks[-1][1]
    hidden_from: int | None = 0 if starts_inside else None
    keep = np.ones(len(content), bool)
    for place, closes in _marks_in(content, marks):
        if closes:
            keep[(hidden_from or 0) : place + len(marks.closing)] = False
            hidden_from = None
        elif hidden_from is None:
            hidden_from = place
    if hidden_from is not None:
        keep[hidden_from:] = False
    return keep


def _marks_in(ids: TokenIds, marks: ThinkingMarks) -> list[tuple[int, bool]]:
    """Return (index, whether it is a closing mark) of every mark, in order."""
    opening = [(place, False) for place in _occurrences(ids, marks.opening)]
    return sorted(opening + [(place, True) for place in _occurrences(ids, marks.closing)])


def _occurrences(ids: TokenIds, mark: tuple[int, ...]) -> list[int]:
    starts = np.flatnonzero(ids == mark[0])
    return [int(start) for start in starts if tuple(ids[start : start + len(mark)].tolist()) == mark]


def split_spans(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Cut a solution, given as the text of each token, into spans [first, last) that follow each other
    without a gap. A span ends with a line, with a sentence, or with the result behind an equals sign, so
    `6+1=7-8=-1#-1` becomes `6+1=7`, `-8=-1`, `#-1`. A piece with neither letter nor digit belongs to the span
    before it. A token in which a span ends belongs to that span whole."""
    text = "".join(texts)
    ends_of_tokens = list(accumulate(map(len, texts)))
    cuts = {bisect_left(ends_of_tokens, match.end()) + 1 for match in _ENDS.finditer(text)}
    bounds = sorted({0, len(texts), *(cut for cut in cuts if cut < len(texts))})
    spans: list[tuple[int, int]] = []
    for first, last in pairwise(bounds):
        if spans and not any(c.isalnum() for piece in texts[first:last] for c in piece):
            spans[-1] = (spans[-1][0], last)
        else:
            spans.append((first, last))
    return spans


def written_spans(response: Sample, texts: Callable[[TokenIds], list[str]]) -> list[tuple[int, int]]:
    """Return the spans of a response's content in which the policy wrote a token, so none of only tool
    output."""
    spans = split_spans(texts(response.content_ids))
    return [(first, last) for first, last in spans if response.loss_mask[first:last].any()]
