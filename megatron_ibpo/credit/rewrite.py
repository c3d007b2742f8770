"""The rewrite test: a correction that is a new solution says nothing about the old one (ibpo step 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Literal

import numpy as np

from megatron_ibpo.edit_distance import batch_distance
from megatron_ibpo.records import Group

__all__ = ["mark_rewrites", "normalized_distances"]


def mark_rewrites(groups: Sequence[Group], threshold: float | Literal["adaptive"]) -> float | None:
    """Fill in `distance`, `reference_distance` and `rewritten` of every correction.

    A correction ŷ of y is a rewrite when d(y, ŷ) > α and, if it had references, d(y, ŷ) > d(ŷ, y_ref) with
    the nearest of them. d is the token edit distance over the longer length, end-of-sequence ids left out.

    Args:
        threshold: α, or "adaptive": mean + 2 population standard deviations of d(y, ŷ) over all corrections.

    Returns:
        α in force; None if it is adaptive and there are no corrections.
    """
    corrections = [(group, correction) for group in groups for correction in group.corrections]
    to_target = []
    to_references = []
    for group, correction in corrections:
        corrected = correction.response.content_ids
        to_target.append((group.responses[correction.target].content_ids, corrected))
        to_references += [(corrected, group.responses[i].content_ids) for i in correction.references]
    distances = normalized_distances(to_target + to_references)
    reference_distances = iter(distances[len(to_target) :])
    alpha = _adaptive_threshold(distances[: len(to_target)]) if threshold == "adaptive" else float(threshold)
    for (_, correction), distance in zip(corrections, distances, strict=False):
        nearest = min((next(reference_distances) for _ in correction.references), default=None)
        correction.distance = distance
        correction.reference_distance = nearest
        correction.rewritten = (
            alpha is not None and distance > alpha and (nearest is None or distance > nearest)
        )
    return alpha


def normalized_distances(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """Levenshtein distance of each pair over the longer length, in [0, 1]; 0 for two empty sequences."""
    return batch_distance(*_packed([a for a, _ in pairs]), *_packed([b for _, b in pairs])).tolist()


def _packed(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All ids one after another, and where each sequence starts."""
    values = np.fromiter(chain.from_iterable(sequences), np.int64)
    return values, np.fromiter(accumulate(map(len, sequences), initial=0), np.int64)


def _adaptive_threshold(distances: Sequence[float]) -> float | None:
    """Mean + 2 population standard deviations; exact sums, so that the order does not matter."""
    if not distances:
        return None
    mean = math.fsum(distances) / len(distances)
    variance = math.fsum((distance - mean) ** 2 for distance in distances) / len(distances)
    return mean + 2 * math.sqrt(variance)
