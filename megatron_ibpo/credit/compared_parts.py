"""The part of a solution that a correction prompt shows, which is also the part compared (ibpo step 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Correction, Flags, Group, Sample, TokenIds, token_ids

Indices = npt.NDArray[np.intp]
Ragged = tuple[TokenIds, npt.NDArray[np.int64]]
"""(values, offsets) of several parts, in the form that megatron_ibpo.edit_distance takes."""


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
    hidden_from: int | None = 0 if _ends_inside(response.prompt_token_ids, marks) else None
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


def _ends_inside(prompt_ids: TokenIds, marks: ThinkingMarks) -> bool:
    prompt_marks = _marks_in(prompt_ids, marks)
    return bool(prompt_marks) and not prompt_marks[-1][1]


def _marks_in(ids: TokenIds, marks: ThinkingMarks) -> list[tuple[int, bool]]:
    """Return (index, whether it is a closing mark) of every mark, in order."""
    opening = [(place, False) for place in _occurrences(ids, marks.opening)]
    return sorted(opening + [(place, True) for place in _occurrences(ids, marks.closing)])


def _occurrences(ids: TokenIds, mark: tuple[int, ...]) -> list[int]:
    starts = np.flatnonzero(ids == mark[0])
    return [int(start) for start in starts if tuple(ids[start : start + len(mark)].tolist()) == mark]
