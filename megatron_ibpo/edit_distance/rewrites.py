"""The rewrite test of IBPO on batches of token ids: is a correction a new solution rather than an edit?"""

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ibpo.edit_distance.distances import (
    SATURATED,
    Ragged,
    check_threads,
    count_edits,
    normalize,
    pair_up,
    read_ragged,
)


class RewriteTest(NamedTuple):
    """The results of the rewrite test for n corrections."""

    rewritten: npt.NDArray[np.bool_]
    """[n]"""
    distance: npt.NDArray[np.float64]
    """[n] d(y, ŷ)"""
    reference_distance: npt.NDArray[np.float64]
    """[n] d(ŷ, nearest reference); infinite if above d(y, ŷ), NaN without references."""
    threshold: float
    """α in force; NaN if it is adaptive and there are no corrections."""


def rewrite_test(
    y: Any,
    y_hat: Any,
    refs: Any,
    *,
    threshold: float | Literal["adaptive"],
    edits: npt.NDArray[np.int64] | None = None,
    num_threads: int = 0,
) -> RewriteTest:
    """Test for rewrites: correction ŷ of y is one if d(y, ŷ) > α and, if it had references, d(y, ŷ) > d(ŷ,
    nearest of them).

    d is the token edit distance over the longer length. The two distances are compared as fractions, not as
    rounded quotients.

    Args:
        y, y_hat: n sequences each: a tuple (values, offsets) as in batch_distance, or a list of sequences.
        refs: the references of each of the n pairs, none, one or several: a list of n lists of sequences.
        threshold: α, or "adaptive" (`adaptive_threshold`).
        edits: number of edits between each y and ŷ, int64 [n], if known: unmodified_mask and batch_distance
            return it.
        num_threads: as in batch_distance.

    Raises:
        TypeError, ValueError: as batch_distance; edits of another length; a threshold that is negative or not
            a number.
    """
    threads = check_threads(num_threads)
    _check_threshold(threshold)
    originals, corrected = pair_up("y", _read("y", y), "y_hat", _read("y_hat", y_hat))
    references, owners = _read_references(refs, len(corrected))
    if edits is None:
        edits = count_edits(originals, corrected, num_threads=threads)
    elif edits.shape != (len(corrected),) or edits.dtype != np.int64:
        raise ValueError(f"edits: must be int64 [{len(corrected)}], not {edits.dtype} {list(edits.shape)}")
    distances = normalize(edits, originals, corrected)
    nearest, farther = _against_references(originals, corrected, references, owners, edits, threads)
    alpha = adaptive_threshold(distances) if isinstance(threshold, str) else float(threshold)
    return RewriteTest((distances > alpha) & farther, distances, nearest, alpha)


def _against_references(
    originals: Ragged,
    corrected: Ragged,
    references: Ragged,
    owners: npt.NDArray[np.int64],
    edits: npt.NDArray[np.int64],
    num_threads: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return (d(ŷ, nearest reference), whether d(y, ŷ) exceeds it); the flag is true without references."""
    candidates, refs = pair_up("y_hat", corrected.take(owners), "refs", references)
    longer = np.maximum(np.maximum(candidates.lengths, refs.lengths), 1)
    longer_y = np.maximum(np.maximum(originals.lengths, corrected.lengths), 1)[owners]
    # a reference that is farther than y decides nothing, and far ones take most of the time
    limits = np.minimum(edits[owners] * longer // longer_y, longer)
    to_reference = count_edits(candidates, refs, limits, num_threads=num_threads)
    nearest = np.full(len(corrected), np.inf)
    np.minimum.at(nearest, owners, normalize(to_reference, candidates, refs))
    farther = np.ones(len(corrected), bool)
    # d(y, ŷ) > d(ŷ, ref) in integers: edits / longer_y > to_reference / longer
    distances = np.where(to_reference == SATURATED, longer, to_reference)
    above = (to_reference != SATURATED) & (edits[owners] * longer > distances * longer_y)
    has_references = np.zeros(len(corrected), bool)
    has_references[owners] = True
    farther[has_references] = False
    np.logical_or.at(farther, owners, above)
    return np.where(has_references, nearest, np.nan), farther


def adaptive_threshold(distances: npt.NDArray[np.float64]) -> float:
    """Return mean + 2 population standard deviations of the distances, NaN without any.

    No intermediate value is rounded, so that a distance equal to the threshold makes no rewrite, and
    neither order nor the number of threads changes it.
    """
    if not distances.size:
        return math.nan
    exact = [Fraction(value) for value in distances.tolist()]
    mean, square = sum(exact, Fraction()) / len(exact), sum((x * x for x in exact), Fraction()) / len(exact)
    return _floor_of_sum(mean, 4 * (square - mean**2))


def _floor_of_sum(x: Fraction, y: Fraction) -> float:
    """Return the largest double that is not above x + √y, both 0 or more.

    A double d exceeds it exactly if it exceeds x + √y. Rounded sums would decide ties by chance, and ties are
    common: corrections that all have one distance, or one in five with another.
    """

    def fits(candidate: float) -> bool:
        excess = Fraction(candidate) - x
        return excess <= 0 or excess * excess <= y

    with localcontext(prec=40):
        floor = float(_decimal(x) + _decimal(y).sqrt())
    while not fits(floor):
        floor = math.nextafter(floor, -math.inf)
    while fits(above := math.nextafter(floor, math.inf)):
        floor = above
    return floor


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _check_threshold(threshold: Any) -> None:
    if isinstance(threshold, str) and threshold == "adaptive":
        return
    if isinstance(threshold, bool | str) or not isinstance(threshold, int | float | np.integer | np.floating):
        raise TypeError(f'threshold: must be a number or "adaptive", not {threshold!r}')
    if math.isnan(threshold) or threshold < 0:
        raise ValueError(f"threshold: must be 0 or more, not {threshold}")


def _read(name: str, sequences: Any) -> Ragged:
    if isinstance(sequences, tuple):
        if len(sequences) != 2:
            raise ValueError(f"{name}: a tuple must be (values, offsets), not of {len(sequences)} entries")
        return read_ragged(name, *sequences)
    return read_ragged(name, sequences)


def _read_references(refs: Any, count: int) -> tuple[Ragged, npt.NDArray[np.int64]]:
    """Return (all references, the pair that each belongs to)."""
    if not isinstance(refs, list) or not all(isinstance(pair_refs, list | tuple) for pair_refs in refs):
        raise TypeError("refs: must be a list with, for each pair, a list of sequences, none to several")
    if len(refs) != count:
        raise ValueError(f"refs: of {len(refs)} pairs, but y has {count}")
    references = read_ragged("refs", [reference for pair_refs in refs for reference in pair_refs])
    return references, np.repeat(np.arange(count), np.array([len(pair_refs) for pair_refs in refs], np.int64))
