"""Checked input: token ids as callers hold them. Anything that is not clearly a batch of ids is refused by
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ibpo import _edit_distance

LONGEST = 2**30 - 1
"""Most ids of one sequence; a batch may hold any number."""


@dataclass(frozen=True)
class Ragged:
    """Sequences of ids: sequence i is values[offsets[i] : offsets[i + 1]]."""

    values: npt.NDArray[Any]
    """int32 or int64, contiguous."""
    offsets: npt.NDArray[np.int64]
    """[number of sequences + 1], from 0 to the number of values."""

    def __len__(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def take(self, indices: npt.NDArray[np.int64]) -> Ragged:
        """Return the sequences with these indices, in this order; each may be taken any number of times."""
        if np.array_equal(indices, np.arange(len(self))):
            return self
        parts = [self.values[self.offsets[i] : self.offsets[i + 1]] for i in indices]
        offsets = np.concatenate([[0], np.cumsum(self.lengths[indices])]).astype(np.int64)
        return Ragged(np.concatenate(parts) if parts else self.values[:0], offsets)


def read_ids(name: str, values: Any) -> npt.NDArray[Any]:
    """Return one sequence as a contiguous, aligned array of int32 or int64, as a view if possible.

    Raises:
        TypeError: it holds something other than such ids; ValueError: it is not 1-D, or has more than LONGEST
            of them.
    """
    array = _read_array(name, values)
    _check_lengths(name, np.array([array.size]))
    return _in_order(array)


def _in_order(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array contiguous and aligned. Lengths are checked first: a few bytes with a stride of 0 pass
    for 2^60 ids."""
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def _read_array(name: str, values: Any) -> npt.NDArray[Any]:
    """Read as `read_ids` does, in whatever memory layout the ids have."""
    if type(values) in (list, tuple) and (ints := _edit_distance.read_ints(values)) is not None:
        return ints
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name}: a masked array; take the ids that count out of it first")
    try:
        holds_bool = isinstance(values, list | tuple) and bool in map(_kind, values)
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: cannot be read as an array of token ids: {error}") from error
    if holds_bool:
        raise TypeError(f"{name}: holds a bool, which is no token id")
    if array.ndim != 1:
        raise ValueError(f"{name}: must be 1-D, not of shape {array.shape}")
    if array.size == 0 and not hasattr(values, "dtype"):  # numpy takes an empty tuple for floats
        array = array.astype(np.int64)
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name}: must hold int32 or int64 ids, not {array.dtype}")
    return array


def _kind(value: Any) -> type:
    """Return the type of a value; bool for anything that numpy would count as one: Python's, numpy's, or a
    tensor."""
    return bool if isinstance(value, bool) or np.asarray(value).dtype == np.bool_ else type(value)


def _read_offsets(name: str, offsets: Any, num_values: int) -> npt.NDArray[np.int64]:
    """Return `offsets` as int64; first 0, never falling, last `num_values`."""
    array = read_ids(name, offsets).astype(np.int64, copy=False)
    if array.size == 0 or array[0] != 0:
        raise ValueError(f"{name}: must start with 0")
    falls = np.flatnonzero(np.diff(array) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(f"{name}: must not fall, but entry {at + 1} is {array[at + 1]} after {array[at]}")
    if array[-1] != num_values:
        raise ValueError(f"{name}: must end with the number of values, {num_values}, not {array[-1]}")
    return array


def read_ragged(name: str, values: Any, offsets: Any = None) -> Ragged:
    """Return the sequences from `<name>_values` and `<name>_offsets`, or from a list of sequences and None.

    Raises:
        TypeError, ValueError: as read_ids; offsets that do not bound the values; a sequence of more than
            LONGEST ids.
    """
    if offsets is None:
        return _concatenate(name, values)
    ids = _read_array(f"{name}_values", values)
    bounds = _read_offsets(f"{name}_offsets", offsets, ids.size)
    _check_lengths(name, np.diff(bounds))
    return Ragged(_in_order(ids), bounds)


def _check_lengths(name: str, lengths: npt.NDArray[np.int64]) -> None:
    too_long = np.flatnonzero(lengths > LONGEST)
    if too_long.size:
        at = int(too_long[0])
        raise ValueError(f"{name}: sequence {at} has {lengths[at]} ids; the most are {LONGEST}")


def _concatenate(name: str, sequences: Any) -> Ragged:
    if not isinstance(sequences, Sequence) or isinstance(sequences, str | bytes):
        raise TypeError(
            f"{name}: values without offsets must be a list of sequences, not {type(sequences).__name__}"
        )
    arrays = [_read_array(f"{name}[{i}]", sequence) for i, sequence in enumerate(sequences)]
    lengths = np.array([array.size for array in arrays], np.int64)
    _check_lengths(name, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(np.concatenate(arrays) if arrays else np.empty(0, np.int64), offsets)


def pair_up(name_a: str, a: Ragged, name_b: str, b: Ragged) -> tuple[Ragged, Ragged]:
    """Return both with ids of one width.

    Raises:
        ValueError: they differ in the number of sequences.
    """
    if len(a) != len(b):
        raise ValueError(f"{name_b}: {len(b)} sequences, but {name_a} has {len(a)}; they go in pairs")
    if a.values.dtype == b.values.dtype:
        return a, b
    common = np.promote_types(a.values.dtype, b.values.dtype)
    return (
        Ragged(a.values.astype(common, copy=False), a.offsets),
        Ragged(b.values.astype(common, copy=False), b.offsets),
    )


def check_threads(num_threads: Any) -> int:
    """Return the number of threads, 0 for one per core, as C++ takes it.

    Raises:
        TypeError: it is not an integer; ValueError: it is negative.
    """
    if isinstance(num_threads, bool) or not isinstance(num_threads, int | np.integer):
        raise TypeError(f"num_threads: must be an integer, not {num_threads!r}")
    if num_threads < 0:
        raise ValueError(f"num_threads: must be 0 or more, not {num_threads}")
    return min(int(num_threads), 2**31 - 1)
