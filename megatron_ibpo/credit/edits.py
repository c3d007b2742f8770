"""What a correction changes of the wrong response: U, the tokens it leaves, and the rest (ibpo step 7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ibpo.credit.shown import Part, ShownPairs
from megatron_ibpo.edit_distance import unmodified_mask
from megatron_ibpo.records import Correction, Response

__all__ = ["TokenFlags", "find_edits", "gradient_mask"]

TokenFlags = npt.NDArray[np.bool_]
"""One flag for each token of a response."""
_FACTORS = np.array([0.0, 1.0], object)
"""Two numbers for all masks: making one for each token takes longer than finding the edits."""


def find_edits(pairs: ShownPairs, *, mark_insertions: bool) -> tuple[list[TokenFlags], npt.NDArray[np.int64]]:
    """For every correction, in order, which tokens of its target it changes: those that the canonical
    alignment of the two does not keep. Fills in `unmodified_share`.

    Tokens that the correction prompt hid count as changed. The end-of-sequence id counts as kept where the
    correction has one too.

    Args:
        mark_insertions: the token before an insertion counts as changed too. Before the first token there is
            none.

    Returns:
        (flags of each, number of edits [corrections])
    """
    kept, kept_of_corrected, counts = unmodified_mask(*pairs.y, *pairs.y_hat, return_other=True)
    flags = zip(
        pairs.members,
        pairs.targets,
        _cut(kept, pairs.y[1]),
        _cut(kept_of_corrected, pairs.y_hat[1]),
        strict=True,
    )
    edits = []
    for (group, correction), target, own, other in flags:
        correction.unmodified_share = float(own.mean()) if own.size else 0.0
        changed = ~own
        if mark_insertions:
            changed[_before_insertions(own, other)] = True
        edits.append(_in_response(changed, target, group.responses[correction.target], correction))
    return edits, counts


def gradient_mask(edits: Sequence[TokenFlags]) -> tuple[float, ...]:
    """m_t of a response from its corrections that count: 1 where any of them changes the token, else 0."""
    return tuple(_FACTORS[np.logical_or.reduce(edits).view(np.uint8)].tolist())


def _cut(flags: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[TokenFlags]:
    return np.split(flags.view(bool), offsets[1:-1]) if len(offsets) > 1 else []


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
