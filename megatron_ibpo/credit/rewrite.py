"""The rewrite test: a correction that is a new solution says nothing about the old one (ibpo step 6)."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ibpo.credit.shown import ComparedPairs, ThinkingMarks, compared
from megatron_ibpo.edit_distance import rewrite_test

__all__ = ["mark_rewrites"]


def mark_rewrites(
    pairs: ComparedPairs,
    edits: npt.NDArray[np.int64],
    threshold: float | Literal["adaptive"],
    marks: ThinkingMarks | None,
) -> float | None:
    """Fill in the distances of every correction and what follows from them: see records.Correction.

    A correction ŷ of y is a rewrite when d(y, ŷ) > α and, if it had references, d(y, ŷ) > d(ŷ, y_ref) with
    the nearest of them. d is the token edit distance over the longer length, of what is compared.

    Args:
        edits: of each pair, as `find_edits` counts them.
        threshold: α, or "adaptive": mean + 2 population standard deviations of d(y, ŷ) over all corrections
            of the step.

    Returns:
        α in force; None if it is adaptive and there are no corrections.
    """
    references = [
        [compared(group.responses[i], marks).ids for i in correction.references]
        for group, correction in pairs.members
    ]
    test = rewrite_test(pairs.y, pairs.y_hat, references, threshold=threshold, edits=edits)
    for i, (_, correction) in enumerate(pairs.members):
        nearest = float(test.reference_distance[i])
        correction.distance = float(test.distance[i])
        correction.reference_distance = nearest if math.isfinite(nearest) else None
        correction.beyond_threshold = bool(test.distance[i] > test.threshold)
        correction.rewritten = bool(test.rewritten[i])
    return None if math.isnan(test.threshold) else test.threshold
