"""The rewrite test: a correction that is a new solution says nothing about the old one (ibpo step 6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ibpo.edit_distance import rewrite_test, unmodified_mask
from megatron_ibpo.records import Group

__all__ = ["mark_rewrites"]


def mark_rewrites(groups: Sequence[Group], threshold: float | Literal["adaptive"]) -> float | None:
    """Fill in what the edit distance tells of every correction: see records.Correction.

    A correction ŷ of y is a rewrite when d(y, ŷ) > α and, if it had references, d(y, ŷ) > d(ŷ, y_ref) with
    the nearest of them. d is the token edit distance over the longer length, end-of-sequence ids left out.

    Args:
        threshold: α, or "adaptive": mean + 2 population standard deviations of d(y, ŷ) over all corrections.

    Returns:
        α in force; None if it is adaptive and there are no corrections.
    """
    pairs = [(group, correction) for group in groups for correction in group.corrections]
    originals = _ids(group.responses[correction.target].content_ids for group, correction in pairs)
    corrected = _ids(correction.response.content_ids for _, correction in pairs)
    references = [
        _ids(group.responses[i].content_ids for i in correction.references) for group, correction in pairs
    ]
    test = rewrite_test(originals, corrected, references, threshold=threshold)
    mask, _ = unmodified_mask(originals, None, corrected, None)
    ends = np.cumsum([len(ids) for ids in originals])
    kept = [part.sum() for part in np.split(mask, ends[:-1])] if pairs else []
    for i, (_, correction) in enumerate(pairs):
        nearest = float(test.reference_distance[i])
        correction.distance = float(test.distance[i])
        correction.reference_distance = None if math.isnan(nearest) else nearest
        correction.rewritten = bool(test.rewritten[i])
        correction.unmodified_share = float(kept[i]) / max(len(originals[i]), 1)
    return None if math.isnan(test.threshold) else test.threshold


def _ids(sequences: Iterable[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
    return [np.fromiter(sequence, np.int64, len(sequence)) for sequence in sequences]
