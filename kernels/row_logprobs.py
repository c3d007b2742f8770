"""Log-probs and entropies of packed rows by the kernels, and the gradient of the logits from that of the
log-probs: one read and one write, in place if wanted."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ibpo.kernels.row_statistics import LOG2E, combine_shards, shard_statistics
from megatron_ibpo.kernels.set_rows import write_set_gradient, write_set_statistics

BLOCK_V = 4096
NUM_WARPS = 8


@triton.jit(do_not_specialize=["vocab_start"])
def logits_gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, shift_ptr, total_ptr, coefficients_ptr, temperature_ptr,
    row_stride, out_row_stride, num_columns, num_out_columns, vocab_start,
    TEMPERATURE_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row per program, c_t·(onehot(target) - softmax) with c_t = coefficient_t /
    temperature_t; a row whose c_t is 0 is not read. out may be the logits. Columns from num_columns to
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


def row_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    mask_N: Tensor | None,
    temperature_N: Tensor | float,
    sampling_sets: Any,
    tp_group: Any,
    vocab_range: tuple[int, int],
    entropy: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Compute log-probs as `megatron_ibpo.loss.logprobs.row_functions` says. Saved are the temperature, [1]
    or [N] fp32, 8 bytes per row, and for restricted rows 4 bytes per id, and the sets. Raises ValueError for
    a target that no shard or its row's set has; on a GPU the device asserts, without waiting."""
    temperature = torch.as_tensor(temperature_N, dtype=torch.float32, device=logits_NV.device)
    temperature = temperature.reshape(-1).contiguous()
    of_shard: dict[str, Any] = {"temperature": temperature, "vocab_range": vocab_range, "entropy": entropy}
    saved_of_sets: tuple[Tensor, ...] = ()
    if sampling_sets is None or not len(logits_NV):
        shard_4N = shard_statistics(logits_NV, targets_N, mask_N, **of_shard)
    else:
        whole_N = sampling_sets.starts_N == sampling_sets.stops_N
        whole_N = whole_N if mask_N is None else whole_N & (mask_N != 0)
        shard_4N = shard_statistics(logits_NV, targets_N, whole_N, **of_shard)
        set_logits_K = write_set_statistics(
            shard_4N, logits_NV, targets_N, mask_N, sampling_sets=sampling_sets, **of_shard
        )
        saved_of_sets = (set_logits_K, *sampling_sets.tensors)
    statistics = combine_shards(shard_4N, mask_N, tp_group)
    _check_targets(statistics.logprobs, targets_N, restricted=sampling_sets is not None)
    saved = (temperature, statistics.shift, statistics.total, *saved_of_sets)
    return statistics.logprobs, statistics.entropy if entropy else None, saved


def write_gradient(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    saved: tuple[Tensor, ...],
    coefficients_N: Tensor,
    vocab_range: tuple[int, int],
) -> None:
    """Write the gradient as `megatron_ibpo.loss.logprobs.row_functions` says."""
    temperature, shift_N, total_N, *saved_of_sets = saved
    assert coefficients_N.dtype == torch.float32
    if not len(logits_NV):
        return
    whole_N = coefficients_N
    if saved_of_sets:
        set_logits_K, *sets = saved_of_sets
        whole_N = torch.where(sets[1] == sets[2], coefficients_N, 0.0)
    logits_gradient_kernel[(len(logits_NV),)](
        logits_NV, out_NV, targets_N, shift_N, total_N, whole_N, temperature,
        logits_NV.stride(0), out_NV.stride(0),
        vocab_range[1] - vocab_range[0], out_NV.shape[1], vocab_range[0],
        TEMPERATURE_PER_ROW=len(temperature) > 1, BLOCK=BLOCK_V, num_warps=NUM_WARPS,
    )  # fmt: skip
    if saved_of_sets:
        write_set_gradient(
            out_NV, targets_N, temperature, shift_N, total_N, set_logits_K, sets, coefficients_N, vocab_range
        )


def _check_targets(logprobs_N: Tensor, targets_N: Tensor, *, restricted: bool) -> None:
    inside = logprobs_N != -torch.inf  # of a target that no shard has
    restriction = ", or not in the sampling set of its row" if restricted else ""
    if logprobs_N.is_cuda:
        torch._assert_async(inside.all(), f"a target id is outside the vocabulary of the logits{restriction}")
    elif not bool(inside.all()):
        bad = targets_N[~inside][0].item()
        raise ValueError(f"target id {bad} is outside the vocabulary of the logits{restriction}")
