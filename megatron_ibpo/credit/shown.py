"""Which part of a solution a correction prompt shows, and so which part is compared (ibpo step 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ibpo.edit_distance import read_ids
from megatron_ibpo.records import Correction, Group, Response

__all__ = ["Part", "Shown", "ShownPairs", "ThinkingMarks", "shown_pairs", "shown_parts"]


@dataclass(frozen=True)
class Part:
    """Some of a response's tokens."""

    ids: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64] | None
    """Where each of them stands in the response; None: it is the whole content, from the first token on."""
    response: Response

    def token_ids(self) -> Sequence[int]:
        """`ids` as the response has them, without making new numbers where it is the whole content."""
        return self.response.content_ids if self.places is None else self.ids.tolist()


@dataclass(frozen=True)
class ThinkingMarks:
    """Token ids of <think> and </think>."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


Shown = Callable[[Sequence[int], Response], Part]
"""(prompt, response) → what is shown of it. A response that has a prompt of its own is taken with that."""


def shown_parts(marks: ThinkingMarks | None) -> Shown:
    """What is shown of responses: all but the end-of-sequence id, or, given marks, all but that and what
    lies between them, marks included.

    A prompt whose last mark is an opening one puts the response inside from its start. Thinking that is
    never closed is hidden to its end; a closing mark that nothing opened hides all that stands before it. A
    part is made once for each response, which must not change in between.
    """
    known: dict[int, tuple[Response, Part]] = {}  # holds the response, so that its id stays its own

    def show(prompt_ids: Sequence[int], response: Response) -> Part:
        if id(response) not in known:
            content = read_ids("response", response.token_ids)[: response.num_content_tokens]
            own_prompt = response.prompt_token_ids or prompt_ids
            part = Part(content, None, response)
            if marks is not None:
                part = _without_thinking(own_prompt, part, marks)
            known[id(response)] = (response, part)
        return known[id(response)][1]

    return show


Ragged = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(values, offsets) of several parts, as megatron_ibpo.edit_distance takes them."""


@dataclass(frozen=True)
class ShownPairs:
    """Every correction of a step with its target, as they are compared."""

    members: list[tuple[Group, Correction]]
    targets: list[Part]
    y: Ragged
    """Of the targets."""
    y_hat: Ragged
    """Of the corrections."""


def shown_pairs(groups: Sequence[Group], shown: Shown) -> ShownPairs:
    """Made once for all comparisons: joining the tokens takes as long as finding few edits."""
    members = [(group, correction) for group in groups for correction in group.corrections]
    targets = [shown(group.prompt.token_ids, group.responses[c.target]) for group, c in members]
    corrected = [shown(c.prompt_token_ids, c.response) for _, c in members]
    return ShownPairs(members, targets, _join(targets), _join(corrected))


def _join(parts: Sequence[Part]) -> Ragged:
    offsets = np.cumsum([0, *(len(part.ids) for part in parts)], dtype=np.int64)
    return np.concatenate([part.ids for part in parts] or [np.empty(0, np.int64)]), offsets


def _without_thinking(prompt_ids: Sequence[int], whole: Part, marks: ThinkingMarks) -> Part:
    content = whole.ids
    hidden_from: int | None = 0 if _ends_inside(read_ids("prompt", prompt_ids), marks) else None
    keep = np.ones(len(content), bool)
    for place, closes in _marks_in(content, marks):
        if closes:
            keep[(hidden_from or 0) : place + len(marks.closing)] = False
            hidden_from = None
        elif hidden_from is None:
            hidden_from = place
    if hidden_from is not None:
        keep[hidden_from:] = False
    places = np.flatnonzero(keep)
    return Part(content[places], places, whole.response)


def _ends_inside(prompt_ids: npt.NDArray[np.int64], marks: ThinkingMarks) -> bool:
    found = _marks_in(prompt_ids, marks)
    return bool(found) and not found[-1][1]


def _marks_in(ids: npt.NDArray[np.int64], marks: ThinkingMarks) -> list[tuple[int, bool]]:
    """(place, whether it is a closing mark) of every mark, in order."""
    opening = [(place, False) for place in _occurrences(ids, marks.opening)]
    return sorted(opening + [(place, True) for place in _occurrences(ids, marks.closing)])


def _occurrences(ids: npt.NDArray[np.int64], mark: tuple[int, ...]) -> list[int]:
    starts = np.flatnonzero(ids[: max(0, len(ids) - len(mark) + 1)] == mark[0])
    return [int(start) for start in starts if tuple(ids[start : start + len(mark)].tolist()) == mark]
