"""Levenshtein distance of one pair and of batches, and the canonical alignment: the tokens that an edit
keeps.

Ids may be in lists, arrays or tensors. Anything that is not clearly a batch of ids is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ibpo import _edit_distance

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
    ids_a, ids_b = read_ids("a", a), read_ids("b", b)
    pair = pair_up(
        "a", Ragged(ids_a, np.array([0, ids_a.size])), "b", Ragged(ids_b, np.array([0, ids_b.size]))
    )
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


def _in_unit(
    a: Ragged, b: Ragged, normalized: bool, cutoff: float | None, *, num_threads: int
) -> npt.NDArray[Any]:
    limits = None if cutoff is None else _limits(cutoff, _longer(a, b), normalized)
    counts = count_edits(a, b, limits, num_threads=num_threads)
    return normalize(counts, a, b) if normalized else counts


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


class Opcode(NamedTuple):
    """a[a_start:a_end] becomes b[b_start:b_end]."""

    tag: Literal["equal", "replace", "delete", "insert"]
    a_start: int
    a_end: int
    b_start: int
    b_end: int


def unmodified_mask(
    y_values: Any,
    y_offsets: Any,
    yhat_values: Any,
    yhat_offsets: Any,
    *,
    num_threads: int = 0,
    return_other: bool = False,
) -> tuple[npt.NDArray[Any], ...]:
    """Return which tokens of each y its edited version ŷ keeps, in the canonical alignment of the two.

    There are many alignments of least cost, and they keep different tokens. This one is fixed, and exact for
    every input:

    1. The common prefix is matched, then the common suffix of the rest.
    2. In the rest, D(i, j) is the distance of the first i tokens of y and the first j of ŷ. A step of the
       alignment to (i, j) is allowed if it is optimal for D; if the two tokens are equal, only matching them
       is allowed. (This loses neither cost nor matches.)
    3. Among the alignments of allowed steps, one with most matches is chosen. Ties are broken from the start:
       match or replace first, then leave out a token of y, then insert one of ŷ.

    So it costs as many edits as the distance and keeps as many tokens as any alignment of that cost. A
    longest common subsequence would keep more; on unrelated texts it keeps several times as many, which mean
    nothing.

    Args:
        y_values, y_offsets, yhat_values, yhat_offsets, num_threads: as in batch_distance.
        return_other: return the mask over ŷ too.

    Returns:
        (mask uint8 [len(y_values)], edits int64 [n]); with return_other (mask, mask over ŷ, edits). The two
        masks keep equally many tokens of each pair, equal ones in the same order.

    Raises:
        TypeError, ValueError: as batch_distance.
    """
    y, yhat = pair_up(
        "y", read_ragged("y", y_values, y_offsets), "yhat", read_ragged("yhat", yhat_values, yhat_offsets)
    )
    mask, yhat_mask, edits = _edit_distance.batch_align(
        y.values, y.offsets, yhat.values, yhat.offsets, check_threads(num_threads)
    )
    return (mask, yhat_mask, edits) if return_other else (mask, edits)


def opcodes(a: Any, b: Any) -> list[Opcode]:
    """Return the edit script that turns `a` into `b` in the canonical alignment (unmodified_mask), for
    display.

    Between two runs of kept tokens, p tokens of `a` give way to q of `b`: min(p, q) are replaced, the others
    are deleted or inserted. The numbers of tokens replaced, deleted and inserted add up to the distance.
    Raises TypeError and ValueError as distance does.
    """
    ids_a, ids_b = read_ids("a", a), read_ids("b", b)
    keep_a, keep_b, _ = unmodified_mask([ids_a], None, [ids_b], None, num_threads=1, return_other=True)
    kept_places = np.stack([np.flatnonzero(keep_a), np.flatnonzero(keep_b)], axis=1)
    ends = np.array([[ids_a.size, ids_b.size]])
    breaks = np.flatnonzero((np.diff(kept_places, axis=0) != 1).any(axis=1)) + 1
    script: list[Opcode] = []
    at_a = at_b = 0
    for run in [*np.split(kept_places, breaks), ends] if len(kept_places) else [ends]:
        first_a, first_b = map(int, run[0])
        script += _gap(at_a, first_a, at_b, first_b)
        at_a, at_b = first_a, first_b
        if run is not ends:
            at_a, at_b = at_a + len(run), at_b + len(run)
            script.append(Opcode("equal", first_a, at_a, first_b, at_b))
    return script


def _gap(a_start: int, a_end: int, b_start: int, b_end: int) -> list[Opcode]:
    replaced = min(a_end - a_start, b_end - b_start)
    steps: list[Opcode] = []
    if replaced:
        steps.append(Opcode("replace", a_start, a_start + replaced, b_start, b_start + replaced))
    if a_start + replaced < a_end:
        steps.append(Opcode("delete", a_start + replaced, a_end, b_end, b_end))
    if b_start + replaced < b_end:
        steps.append(Opcode("insert", a_end, a_end, b_start + replaced, b_end))
    return steps


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
    """Return one sequence as a contiguous, aligned array of int32 or int64, as a view if possible. Raises
    TypeError if it holds something other than such ids, and ValueError if it is not 1-D, or has more than
    LONGEST of them."""
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
    """Return both with ids of one width. Raises ValueError if they differ in the number of sequences."""
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
    """Return the number of threads, 0 for one per core, as C++ takes it. Raises TypeError if it is not an
    integer, and ValueError if it is negative."""
    if isinstance(num_threads, bool) or not isinstance(num_threads, int | np.integer):
        raise TypeError(f"num_threads: must be an integer, not {num_threads!r}")
    if num_threads < 0:
        raise ValueError(f"num_threads: must be 0 or more, not {num_threads}")
    return min(int(num_threads), 2**31 - 1)
