"""Rows that are normalised over a set of ids: statistics and gradient from the logits of these alone, which
are held in between, since the gradient may lie over them. Not run on a GPU: under Triton's interpreter and
compiled ahead of time only."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ibpo.kernels.row_statistics import LOG2E, LOWEST, add_block

BLOCK = 128
NUM_WARPS = 4


@triton.jit
def load_ids(ids_ptr, place, stop, vocab_start, num_columns, BLOCK: tl.constexpr):
    """Return (places, ids, their columns here, which are on this shard) of a block of a set."""
    i = place + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, mask=i < stop, other=-1)
    column = ids - vocab_start
    return i, ids, column, (i < stop) & (column >= 0) & (column < num_columns)


@triton.jit(do_not_specialize=["num_rows", "vocab_start"])
def set_statistics_kernel(
    logits_ptr, targets_ptr, mask_ptr, temperature_ptr,
    ids_ptr, starts_ptr, stops_ptr, set_logits_ptr, out_ptr,
    row_stride, num_rows, num_columns, vocab_start,
    TEMPERATURE_PER_ROW: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row per program, as in `row_statistics_kernel`; a shard without any of
    the ids has a total of 0. Rows without a set are left alone."""
    row = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    if start == stop:
        return
    if mask_ptr is not None and tl.load(mask_ptr + row) == 0:
        return
    k = LOG2E / tl.load(temperature_ptr + (row if TEMPERATURE_PER_ROW else 0)).to(tl.float32)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    shift = tl.full((), LOWEST, tl.float32)
    target_B = tl.full((BLOCK,), float("-inf"), tl.float32)
    total_B = tl.zeros((BLOCK,), tl.float32)
    moment_B = tl.zeros((BLOCK,), tl.float32)
    for place in range(start, stop, BLOCK):
        i, ids, column, in_shard = load_ids(ids_ptr, place, stop, vocab_start, num_columns, BLOCK)
        x = tl.load(logits_ptr + column, mask=in_shard, other=float("-inf")).to(tl.float32)
        tl.store(set_logits_ptr + i, x, mask=in_shard)
        target_B = tl.maximum(target_B, tl.where(ids == target, x, float("-inf")))
        higher = tl.maximum(shift, tl.max(x, 0) * k)
        scale = tl.exp2(shift - higher)
        moment_B = scale * (moment_B + (shift - higher) * total_B)
        total_B, moment_B = add_block(x, k, higher, scale * total_B, moment_B, ENTROPY)
        shift = higher
    out_ptr += row
    tl.store(out_ptr, shift)
    tl.store(out_ptr + num_rows, tl.sum(total_B, 0))
    tl.store(out_ptr + 2 * num_rows, tl.max(target_B, 0) * k - shift)
    tl.store(out_ptr + 3 * num_rows, tl.sum(moment_B, 0))


@triton.jit(do_not_specialize=["vocab_start"])
def set_gradient_kernel(
    set_logits_ptr, out_ptr, targets_ptr, shift_ptr, total_ptr, coefficients_ptr, temperature_ptr,
    ids_ptr, starts_ptr, stops_ptr,
    out_row_stride, num_columns, vocab_start,
    TEMPERATURE_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row per program at the ids of its set; the rest of the row is 0 already."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + (row if TEMPERATURE_PER_ROW else 0)).to(tl.float32)
    c = tl.load(coefficients_ptr + row) / temperature
    if c == 0.0:
        return
    k = LOG2E / temperature
    shift, scale = tl.load(shift_ptr + row), -c / tl.load(total_ptr + row)
    start, stop = tl.load(starts_ptr + row), tl.load(stops_ptr + row)
    target = tl.load(targets_ptr + row)
    out_ptr += row * out_row_stride
    for place in range(start, stop, BLOCK):
        i, ids, column, in_shard = load_ids(ids_ptr, place, stop, vocab_start, num_columns, BLOCK)
        x = tl.load(set_logits_ptr + i, mask=in_shard, other=0.0)
        gradient = scale * tl.exp2(x * k - shift) + tl.where(ids == target, c, 0.0)
        tl.store(out_ptr + column, gradient.to(out_ptr.dtype.element_ty), mask=in_shard)


def write_set_statistics(
    shard_4N: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    mask_N: Tensor | None,
    temperature: Tensor,
    sampling_sets: Any,
    vocab_range: tuple[int, int],
    *,
    entropy: bool,
) -> Tensor:
    """Write the statistics of restricted rows of this shard; return the logits of the ids on it, [K] fp32.
    Arguments as `row_statistics` has them; at least one row."""
    set_logits_K = torch.empty(len(sampling_sets.ids_K), dtype=torch.float32, device=logits_NV.device)
    set_statistics_kernel[(len(logits_NV),)](
        logits_NV, targets_N, mask_N, temperature, *sampling_sets.tensors, set_logits_K, shard_4N,
        logits_NV.stride(0), len(logits_NV), vocab_range[1] - vocab_range[0], vocab_range[0],
        TEMPERATURE_PER_ROW=len(temperature) > 1, ENTROPY=entropy, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return set_logits_K


def write_set_gradient(
    out_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    shift_N: Tensor,
    total_N: Tensor,
    set_logits_K: Tensor,
    sets: Sequence[Tensor],
    coefficients_N: Tensor,
    vocab_range: tuple[int, int],
) -> None:
    """Write the gradient of restricted rows at the ids of their sets, over zeros. `set_logits_K` is the
    result of `write_set_statistics`, `sets` are the fields of the sampling sets."""
    set_gradient_kernel[(len(out_NV),)](
        set_logits_K, out_NV, targets_N, shift_N, total_N, coefficients_N, temperature, *sets,
        out_NV.stride(0), vocab_range[1] - vocab_range[0], vocab_range[0],
        TEMPERATURE_PER_ROW=len(temperature) > 1, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
