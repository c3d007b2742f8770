"""What a correction changes of the wrong response: U, the tokens it leaves, and the rest (ibpo step 7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ibpo.credit.shown import Part, Shown
from megatron_ibpo.edit_distance import unmodified_mask
from megatron_ibpo.records import Correction, Group, Response

__all__ = ["TokenFlags", "find_edits", "gradient_mask"]

TokenFlags = npt.NDArray[np.bool_]
"""One flag for each token of a response."""


def find_edits(groups: Sequence[Group], shown: Shown, *, mark_insertions: bool) -> list[list[TokenFlags]]:
    """For every correction of every group, which tokens of its target it changes: those that the canonical
    alignment of the two does not keep. Fills in `unmodified_share`.

    Tokens that the correction prompt hid count as changed. The end-of-sequence id counts as kept where the
    correction has one too.

    Args:
        mark_insertions: the token before an insertion counts as changed too. Before the first token there is
            none.
    """
    pairs = [(group, correction) for group in groups for correction in group.corrections]
    targets = [shown(g.prompt.token_ids, g.responses[c.target]) for g, c in pairs]
    corrected = [shown(c.prompt_token_ids, c.response) for _, c in pairs]
    kept, kept_of_corrected, _ = unmodified_mask(
        [part.ids for part in targets], None, [part.ids for part in corrected], None, return_other=True
    )
    flags = zip(pairs, targets, _cut(kept, targets), _cut(kept_of_corrected, corrected), strict=True)
    edits: dict[int, list[TokenFlags]] = {id(group): [] for group in groups}
    for (group, correction), target, own, other in flags:
        correction.unmodified_share = float(own.mean()) if own.size else 0.0
        changed = ~own
        if mark_insertions:
            changed[_before_insertions(own, other)] = True
        edits[id(group)].append(_in_response(changed, target, group.responses[correction.target], correction))
    return [edits[id(group)] for group in groups]


def gradient_mask(edits: Sequence[TokenFlags]) -> tuple[float, ...]:
    """m_t of a response from its corrections that count: 1 where any of them changes the token, else 0."""
    return tuple(np.logical_or.reduce(edits).astype(np.float64).tolist())


def _cut(flags: npt.NDArray[np.uint8], parts: Sequence[Part]) -> list[TokenFlags]:
    ends = np.cumsum([len(part.ids) for part in parts], dtype=np.int64)
    return np.split(flags.astype(bool), ends[:-1]) if parts else []


def _before_insertions(kept: TokenFlags, kept_of_corrected: TokenFlags) -> npt.NDArray[np.int64]:
    """Places of kept tokens after which the correction has tokens of its own and the target none."""
    ours, theirs = np.flatnonzero(kept), np.flatnonzero(kept_of_corrected)
    gap_here = np.diff(ours, append=len(kept)) - 1
    gap_there = np.diff(theirs, append=len(kept_of_corrected)) - 1
    return ours[(gap_here == 0) & (gap_there > 0)]


def _in_response(changed: TokenFlags, part: Part, response: Response, correction: Correction) -> TokenFlags:
    """From the tokens of a part to those of the whole response."""
    flags = np.ones(len(response.token_ids), bool)
    flags[slice(len(changed)) if part.places is None else part.places] = changed
    if response.finish_reason == "stop":
        flags[-1] = correction.response.finish_reason != "stop"
    return flags
