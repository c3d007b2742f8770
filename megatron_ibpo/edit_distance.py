"""Levenshtein distance of token-id sequences: the Python face of csrc/.

Ids are int32 or int64, of any size and sign, in numpy arrays, CPU tensors or anything else that numpy views
without a copy; sequences of Python ints are taken too and copied. The GIL is released during the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ibpo import _edit_distance

__all__ = ["batch_distance", "distance"]


def distance(a: Any, b: Any, *, normalized: bool = True) -> float:
    """Insertions, deletions and substitutions that turn `a` into `b`.

    Args:
        a, b: token ids, 1-D.
        normalized: divide by the longer length: 0 for equal (also for two empty) sequences, 1 when nothing
            is shared. Not a metric: the triangle inequality holds for counts only.

    Raises:
        TypeError: an argument holds something other than int32 or int64 ids; ValueError: it is not 1-D.
    """
    ids_a, ids_b = _same_dtype(_ids("a", a), _ids("b", b))
    ends_a, ends_b = np.array([0, ids_a.size]), np.array([0, ids_b.size])
    count = int(_edit_distance.batch_distance(ids_a, ends_a, ids_b, ends_b, None, 1)[0])
    return count / max(ids_a.size, ids_b.size, 1) if normalized else float(count)


def batch_distance(
    a_values: Any,
    a_offsets: Any,
    b_values: Any,
    b_offsets: Any,
    *,
    normalized: bool = True,
    num_threads: int = 0,
) -> npt.NDArray[np.float64]:
    """`distance` of n pairs of sequences of any lengths.

    Sequence i of `a` is `a_values[a_offsets[i] : a_offsets[i + 1]]`, as with cu_seqlens; likewise `b`.

    Args:
        a_values, b_values: token ids of all sequences, one after another, 1-D.
        a_offsets, b_offsets: int32 or int64 [n + 1]; first 0, never falling, last the number of values.
        normalized: as in `distance`.
        num_threads: at most this many threads, 0: one a core. The result does not depend on it.

    Returns:
        float64 [n].

    Raises:
        TypeError: values or offsets are not int32 or int64, num_threads is no integer; ValueError: not 1-D,
            offsets as above not met, a and b of different n, or num_threads below 0.
    """
    if not isinstance(num_threads, int | np.integer):
        raise TypeError(f"num_threads: must be an integer, not {num_threads!r}")
    if num_threads < 0:
        raise ValueError(f"num_threads: must be 0 or more, not {num_threads}")
    ids_a, ids_b = _same_dtype(_ids("a_values", a_values), _ids("b_values", b_values))
    ends_a = _offsets("a_offsets", a_offsets, ids_a.size)
    ends_b = _offsets("b_offsets", b_offsets, ids_b.size)
    if ends_a.size != ends_b.size:
        raise ValueError(
            f"b_offsets: {ends_b.size - 1} sequences, but a_offsets has {ends_a.size - 1}; they go in pairs"
        )
    counts = _edit_distance.batch_distance(ids_a, ends_a, ids_b, ends_b, None, num_threads)
    distances = counts.astype(np.float64)
    if normalized:
        distances /= np.maximum(np.maximum(np.diff(ends_a), np.diff(ends_b)), 1)
    return distances


def _ids(name: str, values: Any) -> npt.NDArray[Any]:
    """`values` as a contiguous, aligned array of int32 or int64, a view wherever one is possible."""
    if type(values) is list and (ints := _edit_distance.read_ints(values)) is not None:
        return ints
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: cannot be read as an array of token ids: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name}: must be 1-D, not of shape {array.shape}")
    if array.size == 0 and not hasattr(values, "dtype"):  # numpy takes an empty tuple for floats
        array = array.astype(np.int64)
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name}: must hold int32 or int64 ids, not {array.dtype}")
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def _same_dtype(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if a.dtype == b.dtype:
        return a, b
    common = np.promote_types(a.dtype, b.dtype)
    return a.astype(common, copy=False), b.astype(common, copy=False)


def _offsets(name: str, offsets: Any, num_values: int) -> npt.NDArray[np.int64]:
    array = _ids(name, offsets).astype(np.int64, copy=False)
    if array.size == 0 or array[0] != 0:
        raise ValueError(f"{name}: must start with 0")
    if array[-1] != num_values:
        raise ValueError(f"{name}: must end with the number of values, {num_values}, not {array[-1]}")
    falls = np.flatnonzero(np.diff(array) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(f"{name}: must not fall, but entry {at + 1} is {array[at + 1]} after {array[at]}")
    return array
