"""One read of the logits: what the log-prob, the entropy and the gradient of each row need, with k =
log2(e)/temperature

    shift   k·m for a logit m near the row's largest       total   Σ 2^(k·x - shift) target  k·x_target -
    shift, -inf on other shards       moment  Σ (k·x - shift)·2^(k·x - shift), for the entropy

A GPU reads bf16 faster than it issues the instructions of a running maximum. So the shift is chosen before
the loop: the larger of the first block's largest logit and the target's, which is rarely far below the row's.
A row whose total still passes 2^30 is read once more, with a shift that moves.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 4096
NUM_WARPS = 8
BLOCK_N = 256

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST_TOTAL = tl.constexpr(2.0**30)
LOWEST = tl.constexpr(-1e30)  # a first block of nothing but -inf would make the shift useless


class RowStatistics(NamedTuple):
    """[N] fp32 each, over the whole vocabulary; rows that were left out have log-prob and entropy 0."""

    shift: Tensor
    total: Tensor
    logprobs: Tensor
    entropy: Tensor


@triton.jit
def load_block(logits_ptr, start, num_columns, BLOCK: tl.constexpr, FULL: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    if FULL:
        return tl.load(logits_ptr + column).to(tl.float32)
    return tl.load(logits_ptr + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)


@triton.jit
def add_block(x, k, shift, total_B, moment_B, ENTROPY: tl.constexpr):
    """Return the sums with one more block, each lane for itself."""
    d = x * k - shift
    e = tl.exp2(d)
    if ENTROPY:
        moment_B += tl.maximum(d, LOWEST) * e  # d is -inf beyond the last column and where a logit is
    return total_B + e, moment_B


@triton.jit
def sums_at(logits_ptr, num_columns, k, shift, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Return (total, moment) of a row, with the same shift in all its blocks."""
    total_B = tl.zeros((BLOCK,), tl.float32)
    moment_B = tl.zeros((BLOCK,), tl.float32)
    full_columns = num_columns // BLOCK * BLOCK
    for start in range(0, full_columns, BLOCK):
        x = load_block(logits_ptr, start, num_columns, BLOCK, True)
        total_B, moment_B = add_block(x, k, shift, total_B, moment_B, ENTROPY)
    if full_columns < num_columns:
        x = load_block(logits_ptr, full_columns, num_columns, BLOCK, False)
        total_B, moment_B = add_block(x, k, shift, total_B, moment_B, ENTROPY)
    return tl.sum(total_B, 0), tl.sum(moment_B, 0)


@triton.jit
def sums_with_moving_shift(logits_ptr, num_columns, k, shift, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Return (shift, total, moment) of a row whose largest logit lies far above the shift."""
    total_B = tl.zeros((BLOCK,), tl.float32)
    moment_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        x = load_block(logits_ptr, start, num_columns, BLOCK, False)
        higher = tl.maximum(shift, tl.max(x, 0) * k)
        scale = tl.exp2(shift - higher)
        moment_B = scale * (moment_B + (shift - higher) * total_B)
        total_B, moment_B = add_block(x, k, higher, scale * total_B, moment_B, ENTROPY)
        shift = higher
    return shift, tl.sum(total_B, 0), tl.sum(moment_B, 0)


@triton.jit(do_not_specialize=["num_rows", "vocab_start"])
def row_statistics_kernel(
    logits_ptr, targets_ptr, mask_ptr, temperature_ptr, out_ptr,
    row_stride, num_rows, num_columns, vocab_start,
    TEMPERATURE_PER_ROW: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row per program. out [4, N] fp32: shift, total, target, moment."""
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row
    if mask_ptr is not None and tl.load(mask_ptr + row) == 0:
        return  # what is out there stays undefined; combine_kernel does not look
    k = LOG2E / tl.load(temperature_ptr + (row if TEMPERATURE_PER_ROW else 0)).to(tl.float32)
    logits_ptr += row * row_stride
    column = tl.load(targets_ptr + row) - vocab_start
    in_shard = (column >= 0) & (column < num_columns)
    x_target = tl.load(logits_ptr + column, mask=in_shard, other=float("-inf")).to(tl.float32)
    first = tl.max(load_block(logits_ptr, 0, num_columns, BLOCK, False), 0)
    shift = tl.maximum(tl.maximum(first, x_target) * k, LOWEST)
    total, moment = sums_at(logits_ptr, num_columns, k, shift, ENTROPY, BLOCK)
    if not total < LARGEST_TOTAL:
        shift, total, moment = sums_with_moving_shift(logits_ptr, num_columns, k, shift, ENTROPY, BLOCK // 4)
    tl.store(out_ptr, shift)
    tl.store(out_ptr + num_rows, total)
    tl.store(out_ptr + 2 * num_rows, x_target * k - shift)
    tl.store(out_ptr + 3 * num_rows, moment)


@triton.jit(do_not_specialize=["num_rows", "num_shards"])
def combine_kernel(
    shards_ptr, mask_ptr, shift_ptr, total_ptr, logprobs_ptr, entropy_ptr,
    num_rows, num_shards, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine shards [R, 4, N] into the statistics of the whole vocabulary, BLOCK rows per program."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    real = inside
    if mask_ptr is not None:
        real = tl.load(mask_ptr + row, mask=inside, other=0) != 0
    shift = tl.full((BLOCK,), float("-inf"), tl.float32)
    for shard in range(num_shards):
        shift = tl.maximum(shift, tl.load(shards_ptr + shard * 4 * num_rows + row, mask=real, other=0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    target = tl.full((BLOCK,), float("-inf"), tl.float32)
    for shard in range(num_shards):
        shard_ptr = shards_ptr + shard * 4 * num_rows + row
        lower = tl.load(shard_ptr, mask=real, other=0.0) - shift
        scale = tl.exp2(lower)
        part = tl.load(shard_ptr + num_rows, mask=real, other=1.0)
        total += scale * part
        target = tl.maximum(target, tl.load(shard_ptr + 2 * num_rows, mask=real, other=0.0) + lower)
        moment += scale * (tl.load(shard_ptr + 3 * num_rows, mask=real, other=0.0) + lower * part)
    log_total = tl.log2(total)
    tl.store(shift_ptr + row, shift, mask=inside)
    tl.store(total_ptr + row, total, mask=inside)
    tl.store(logprobs_ptr + row, tl.where(real, (target - log_total) * LN2, 0.0), mask=inside)
    tl.store(entropy_ptr + row, tl.where(real, (log_total - moment / total) * LN2, 0.0), mask=inside)


def shard_statistics(
    logits_NV: Tensor,
    targets_N: Tensor,
    mask_N: Tensor | None,
    temperature: Tensor,
    vocab_range: tuple[int, int],
    *,
    entropy: bool = True,
) -> Tensor:
    """Return [4, N] statistics of this shard for the rows of `mask_N` (all when None), undefined in others.

    Logits are bf16, fp16 or fp32 with contiguous columns, `temperature` is [1] or [N]. Without `entropy` the
    moment is meaningless, and the pass has two instructions less an element.
    """
    num_rows = len(logits_NV)
    shard_4N = torch.empty(4, num_rows, dtype=torch.float32, device=logits_NV.device)
    if num_rows:
        row_statistics_kernel[(num_rows,)](
            logits_NV, targets_N, mask_N, temperature, shard_4N,
            logits_NV.stride(0), num_rows, vocab_range[1] - vocab_range[0], vocab_range[0],
            TEMPERATURE_PER_ROW=len(temperature) > 1, ENTROPY=entropy, BLOCK=BLOCK_V, num_warps=NUM_WARPS,
        )  # fmt: skip
    return shard_4N


def combine_shards(shard_4N: Tensor, mask_N: Tensor | None, tp_group: Any) -> RowStatistics:
    """Return the statistics of the whole vocabulary for the rows of `mask_N`. One all-gather."""
    num_rows = shard_4N.shape[1]
    shards = shard_4N[None]
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        parts = [torch.empty_like(shard_4N) for _ in range(dist.get_world_size(tp_group))]
        dist.all_gather(parts, shard_4N, group=tp_group)
        shards = torch.stack(parts)
    statistics = RowStatistics(
        *(torch.empty(num_rows, dtype=torch.float32, device=shard_4N.device) for _ in range(4))
    )
    if num_rows:
        combine_kernel[(triton.cdiv(num_rows, BLOCK_N),)](
            shards, mask_N, *statistics, num_rows, len(shards), BLOCK=BLOCK_N, num_warps=4
        )
    return statistics
