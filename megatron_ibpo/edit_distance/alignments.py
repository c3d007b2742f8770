"""The canonical alignment: the tokens that an edit keeps."""

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ibpo import _edit_distance
from megatron_ibpo.edit_distance.inputs import check_threads, pair_up, read_ids, read_ragged


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

    Raises:
        TypeError, ValueError: as distance.
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
