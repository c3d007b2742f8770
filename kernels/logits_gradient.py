"""The gradient of the logits from that of the log-probs: one read and one write, in place if wanted.

Row t becomes c_t·(onehot(target) - softmax) with c_t = coefficient_t / temperature_t. A row whose c_t is 0
(masked, clipped, no advantage) is only written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ibpo.kernels.row_statistics import LOG2E

BLOCK_V = 4096
NUM_WARPS = 8


@triton.jit(do_not_specialize=["vocab_start"])
def logits_gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, shift_ptr, total_ptr, coefficients_ptr, temperature_ptr,
    row_stride, out_row_stride, num_columns, num_out_columns, vocab_start,
    TEMPERATURE_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row per program; out may be the logits. Columns from num_columns to
    num_out_columns become 0."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + (row if TEMPERATURE_PER_ROW else 0)).to(tl.float32)
    c = tl.load(coefficients_ptr + row) / temperature
    logits_ptr += row * row_stride
    out_ptr += row * out_row_stride
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    if c == 0.0:
        for start in range(0, num_out_columns, BLOCK):
            tl.store(out_ptr + start + lanes, zeros, mask=start + lanes < num_out_columns)
        return
    k = LOG2E / temperature
    shift = tl.load(shift_ptr + row)
    # softmax is 2^(k·x - shift) / total: the division goes into the coefficient
    scale = -c / tl.load(total_ptr + row)
    column = tl.load(targets_ptr + row) - vocab_start
    in_shard = (column >= 0) & (column < num_columns)
    column = tl.where(in_shard, column, 0)
    at_target = c + scale * tl.exp2(tl.load(logits_ptr + column).to(tl.float32) * k - shift)
    tl.debug_barrier()  # the target is read before any warp writes over it …
    full_columns = num_columns // BLOCK * BLOCK
    for start in range(0, full_columns, BLOCK):
        x = tl.load(logits_ptr + start + lanes).to(tl.float32)
        tl.store(out_ptr + start + lanes, (scale * tl.exp2(x * k - shift)).to(out_ptr.dtype.element_ty))
    if full_columns < num_columns:
        real = full_columns + lanes < num_columns
        x = tl.load(logits_ptr + full_columns + lanes, mask=real, other=0.0).to(tl.float32)
        tl.store(
            out_ptr + full_columns + lanes,
            (scale * tl.exp2(x * k - shift)).to(out_ptr.dtype.element_ty),
            mask=real,
        )
    for start in range(num_columns, num_out_columns, BLOCK):
        tl.store(out_ptr + start + lanes, zeros, mask=start + lanes < num_out_columns)
    tl.debug_barrier()  # … and written after all have
    if in_shard:
        tl.store(out_ptr + column, at_target.to(out_ptr.dtype.element_ty))


def write_gradient(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: Tensor,
    shift_N: Tensor,
    total_N: Tensor,
    coefficients_N: Tensor,
    vocab_range: tuple[int, int],
) -> None:
    """Write the gradient of all rows and columns into out_NV, which may be logits_NV.

    Args:
        out_NV: [N, V] of the logits' shape, columns contiguous.
        temperature: [1] or [N].
        shift_N, total_N: of `row_statistics`.
        coefficients_N: [N] fp32 gradient of each row's log-prob; 0 where it takes no part.
    """
    assert coefficients_N.dtype == torch.float32
    if len(logits_NV) == 0:
        return
    logits_gradient_kernel[(len(logits_NV),)](
        logits_NV,
        out_NV,
        targets_N,
        shift_N,
        total_N,
        coefficients_N,
        temperature,
        logits_NV.stride(0),
        out_NV.stride(0),
        vocab_range[1] - vocab_range[0],
        out_NV.shape[1],
        vocab_range[0],
        TEMPERATURE_PER_ROW=len(temperature) > 1,
        BLOCK=BLOCK_V,
        num_warps=NUM_WARPS,
    )
