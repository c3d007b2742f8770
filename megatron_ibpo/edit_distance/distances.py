"""Levenshtein distance of one pair and of batches."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ibpo import _edit_distance
from megatron_ibpo.edit_distance.inputs import Ragged, check_threads, pair_up, read_ids, read_ragged

SATURATED: int = np.iinfo(np.int64).max
"""Count of edits above the cutoff; the exact number is unknown."""


def distance(a: Any, b: Any, *, normalized: bool = True, cutoff: float | None = None) -> float:
    """Return the number of insertions, deletions and substitutions that turn `a` into `b`.

    Args:
        a, b: token ids, 1-D.
        normalized: divide by the longer length: 0 for equal (also for two empty) sequences, 1 when nothing is
            shared. Not a metric: the triangle inequality holds for counts only.
        cutoff: a larger distance, in the unit of the result, is returned as infinite. That takes less time.

    Raises:
        TypeError: an argument holds something other than int32 or int64 ids; ValueError: it is not 1-D, or
            the cutoff is negative or not a number.
    """
    pair = pair_up("a", _single("a", a), "b", _single("b", b))
    (result,) = _in_unit(*pair, normalized, cutoff, num_threads=1).tolist()
    return math.inf if result == SATURATED else float(result)


def batch_distance(
    a_values: Any,
    a_offsets: Any,
    b_values: Any,
    b_offsets: Any,
    *,
    normalized: bool = True,
    cutoff: float | None = None,
    num_threads: int = 0,
) -> npt.NDArray[Any]:
    """Return `distance` of n pairs of sequences of any lengths.

    Sequence i of `a` is `a_values[a_offsets[i] : a_offsets[i + 1]]`, as with cu_seqlens; likewise `b`.
    Instead, `a_values` may be a list of n sequences and `a_offsets` None.

    Args:
        a_values, b_values: token ids of all sequences, one after another, 1-D.
        a_offsets, b_offsets: int32 or int64 [n + 1]; first 0, never falling, last the number of values.
        normalized, cutoff: as in `distance`.
        num_threads: at most this many threads; 0: one per core. The result does not depend on it.

    Returns:
        float64 [n], infinite above the cutoff; with normalized=False int64 [n], SATURATED above it.

    Raises:
        TypeError: values or offsets are not int32 or int64, num_threads is no integer; ValueError: not 1-D,
            offsets as above not met, a and b of different n, a sequence of 2^30 ids or more, num_threads
            below 0, or a cutoff below 0 or not a number.
    """
    pairs = pair_up("a", read_ragged("a", a_values, a_offsets), "b", read_ragged("b", b_values, b_offsets))
    return _in_unit(*pairs, normalized, cutoff, num_threads=check_threads(num_threads))


def count_edits(
    a: Ragged, b: Ragged, limits: npt.NDArray[np.int64] | None = None, *, num_threads: int = 0
) -> npt.NDArray[np.int64]:
    """Return the edits of each pair, SATURATED if there are more than its limit; a and b come from
    pair_up."""
    return _edit_distance.batch_distance(a.values, a.offsets, b.values, b.offsets, limits, num_threads)


def normalize(counts: npt.NDArray[np.int64], a: Ragged, b: Ragged) -> npt.NDArray[np.float64]:
    """Return the counts over the longer length; infinite where SATURATED."""
    return np.where(counts == SATURATED, np.inf, counts / np.maximum(_longer(a, b), 1))


def _single(name: str, values: Any) -> Ragged:
    ids = read_ids(name, values)
    return read_ragged(name, ids, np.array([0, ids.size]))


def _in_unit(
    a: Ragged, b: Ragged, normalized: bool, cutoff: float | None, *, num_threads: int
) -> npt.NDArray[Any]:
    limits = None if cutoff is None else _limits(cutoff, _longer(a, b), normalized)
    counts = count_edits(a, b, limits, num_threads=num_threads)
    if normalized:
        return normalize(counts, a, b)
    return counts


def _longer(a: Ragged, b: Ragged) -> npt.NDArray[np.int64]:
    return np.maximum(a.lengths, b.lengths)


def _limits(cutoff: float, longer: npt.NDArray[np.int64], normalized: bool) -> npt.NDArray[np.int64]:
    """Return the most edits that do not exceed the cutoff.

    For fractions this is the largest K with K / longer <= cutoff in double precision, so that the answer
    agrees with comparing the distance itself.
    """
    if isinstance(cutoff, bool) or not isinstance(cutoff, int | float | np.integer | np.floating):
        raise TypeError(f"cutoff: must be a number, not {cutoff!r}")
    if not cutoff >= 0:  # nor is NaN
        raise ValueError(f"cutoff: must be 0 or more, not {cutoff}")
    if not normalized:
        return np.minimum(np.floor(min(cutoff, 2.0**62)), longer).astype(np.int64)
    divisors = np.maximum(longer, 1)
    fraction = float(min(cutoff, 1.0))
    edits = np.floor(fraction * longer).astype(np.int64)
    edits += (edits + 1) / divisors <= fraction
    edits -= edits / divisors > fraction
    return np.minimum(edits, longer)
