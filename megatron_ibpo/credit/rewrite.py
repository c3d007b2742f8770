"""The rewrite test: a correction that is a new solution says nothing about the old one (ibpo step 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from megatron_ibpo.credit.shown import Shown
from megatron_ibpo.edit_distance import rewrite_test
from megatron_ibpo.records import Group

__all__ = ["mark_rewrites"]


def mark_rewrites(
    groups: Sequence[Group], threshold: float | Literal["adaptive"], shown: Shown
) -> float | None:
    """Fill in the distances of every correction and what follows from them: see records.Correction.

    A correction ŷ of y is a rewrite when d(y, ŷ) > α and, if it had references, d(y, ŷ) > d(ŷ, y_ref) with
    the nearest of them. d is the token edit distance over the longer length, of what is shown.

    Args:
        threshold: α, or "adaptive": mean + 2 population standard deviations of d(y, ŷ) over all corrections
            of the step. Every rank credits all groups of the step, so it is the same on all.

    Returns:
        α in force; None if it is adaptive and there are no corrections.
    """
    pairs = [(group, correction) for group in groups for correction in group.corrections]
    test = rewrite_test(
        [shown(g.prompt.token_ids, g.responses[c.target]).ids for g, c in pairs],
        [shown(c.prompt_token_ids, c.response).ids for _, c in pairs],
        [[shown(g.prompt.token_ids, g.responses[i]).ids for i in c.references] for g, c in pairs],
        threshold=threshold,
    )
    for i, (_, correction) in enumerate(pairs):
        nearest = float(test.reference_distance[i])
        correction.distance = float(test.distance[i])
        correction.reference_distance = None if math.isnan(nearest) else nearest
        correction.beyond_threshold = bool(test.distance[i] > test.threshold)
        correction.rewritten = bool(test.rewritten[i])
    return None if math.isnan(test.threshold) else test.threshold
