"""Log-probs and entropies of packed rows: vocabulary-parallel, statistics in fp32, chunk by chunk.

The one log-softmax of the project: the loss, old log-probs and reference log-probs all come from here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["packed_logprobs"]

CHUNK_BYTES = 64 * 1024**2
"""Of fp32 logits held at once."""


def packed_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    response_mask_N: Tensor | None = None,
    temperature_N: Tensor | float = 1.0,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each row's target, and entropy of each row's distribution, at its temperature.

    Args:
        logits_NV: [N, V] this rank's columns of the logits; row t predicts targets_N[t].
        targets_N: [N] int64 global vocabulary ids.
        response_mask_N: [N]; rows with 0 are not computed and come out as 0. All rows when None.
        temperature_N: a number or [N]; logits are divided by it.
        tp_group: process group over which the vocabulary is sharded; one all-gather of row statistics.
        vocab_range: (start, stop) of the global ids in this rank's columns; columns from stop - start on are
            padding and take no part. Equal contiguous shards when None.
        inplace: let the backward pass write the gradient over the logits, which must not be used after.

    Returns:
        (logprobs_N, entropy_N), fp32 (fp64 for fp64 logits). Only the first carries a gradient.

    Raises:
        ValueError: shapes that do not fit, or a target outside the whole vocabulary.
    """
    num_rows, num_columns = logits_NV.shape
    if targets_N.shape != (num_rows,):
        raise ValueError(f"targets_N has shape {tuple(targets_N.shape)}, logits_NV has {num_rows} rows")
    if vocab_range is None:
        rank = 0 if tp_group is None else dist.get_rank(tp_group)
        vocab_range = (rank * num_columns, (rank + 1) * num_columns)
    if not 0 < vocab_range[1] - vocab_range[0] <= num_columns:
        raise ValueError(f"vocab_range {vocab_range} does not fit {num_columns} columns")
    rows = (
        torch.arange(num_rows, device=logits_NV.device)
        if response_mask_N is None
        else response_mask_N.nonzero().squeeze(1)
    )
    temperature = torch.as_tensor(temperature_N, device=logits_NV.device).expand(num_rows)
    return _RowLogprobs.apply(logits_NV, targets_N, rows, temperature, tp_group, vocab_range, inplace)


class _RowLogprobs(torch.autograd.Function):
    """Keeps the logits and one statistic a row; the softmax is recomputed chunk by chunk."""

    @staticmethod
    def forward(ctx, logits_NV, targets_N, rows, temperature_N, tp_group, vocab_range, inplace):
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        local_4R = torch.empty(4, len(rows), dtype=dtype, device=logits_NV.device)
        for part in _chunks(rows, logits_NV.shape[1]):
            x_RV = _scaled(logits_NV, rows[part], temperature_N, vocab_range, dtype)
            local_4R[:, part] = _row_statistics(x_RV, targets_N[rows[part]], vocab_range)
        log_sum_exp, target_logit, mean_logit = _combine(local_4R, tp_group)
        if not bool(target_logit.isfinite().all()) and bool(log_sum_exp.isfinite().all()):
            bad = targets_N[rows][~target_logit.isfinite()][0].item()
            raise ValueError(f"target id {bad} is outside the vocabulary of the logits")

        logprobs_N = torch.zeros(logits_NV.shape[0], dtype=dtype, device=logits_NV.device)
        entropy_N = torch.zeros_like(logprobs_N)
        logprobs_N[rows] = target_logit - log_sum_exp
        entropy_N[rows] = log_sum_exp - mean_logit
        ctx.save_for_backward(logits_NV, targets_N, rows, temperature_N, log_sum_exp)
        ctx.vocab_range, ctx.inplace = vocab_range, inplace
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, *grads):
        logits_NV, targets_N, rows, temperature_N, log_sum_exp = ctx.saved_tensors
        start, stop = ctx.vocab_range
        coefficient_R = (grads[0] / temperature_N)[rows].to(log_sum_exp.dtype)
        out_NV = logits_NV.detach() if ctx.inplace else torch.zeros_like(logits_NV)
        for part in _chunks(rows, logits_NV.shape[1]):
            x_RV = _scaled(logits_NV, rows[part], temperature_N, ctx.vocab_range, log_sum_exp.dtype)
            grad_RV = (x_RV - log_sum_exp[part, None]).exp_().neg_()
            own, column = _own_targets(targets_N[rows[part]], start, stop)
            grad_RV[own, column[own]] += 1.0
            grad_RV *= coefficient_R[part, None]
            out_NV[rows[part], : stop - start] = grad_RV.to(out_NV.dtype)
        if ctx.inplace:
            untouched = torch.ones(len(out_NV), dtype=torch.bool, device=out_NV.device)
            untouched[rows] = False
            out_NV[untouched] = 0
            out_NV[:, stop - start :] = 0
        return out_NV, None, None, None, None, None, None


def _chunks(rows: Tensor, num_columns: int) -> list[slice]:
    """Slices of `rows` whose fp32 logits fit CHUNK_BYTES."""
    size = max(1, CHUNK_BYTES // (4 * num_columns))
    return [slice(first, first + size) for first in range(0, len(rows), size)]


def _scaled(
    logits_NV: Tensor, rows_R: Tensor, temperature_N: Tensor, vocab_range: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    width = vocab_range[1] - vocab_range[0]
    return logits_NV[rows_R, :width].to(dtype) / temperature_N[rows_R, None].to(dtype)


def _own_targets(targets_R: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(which targets lie in this rank's columns, their column there; 0 for the others)."""
    own = (targets_R >= start) & (targets_R < stop)
    return own, torch.where(own, targets_R - start, 0)


def _row_statistics(x_RV: Tensor, targets_R: Tensor, vocab_range: tuple[int, int]) -> Tensor:
    """[4, R]: max, sum of exp(x - max), sum of x·exp(x - max), target logit (-inf where not here)."""
    own, column = _own_targets(targets_R, *vocab_range)
    target = x_RV.gather(1, column[:, None]).squeeze(1).masked_fill(~own, -torch.inf)
    largest = x_RV.amax(1)
    weights_RV = (x_RV - largest[:, None]).exp_()
    return torch.stack([largest, weights_RV.sum(1), (weights_RV * x_RV).sum(1), target])


def _combine(local_4R: Tensor, tp_group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, target logit, mean logit) over all vocabulary shards."""
    if tp_group is None or dist.get_world_size(tp_group) == 1:
        shards = local_4R[None]
    else:
        parts = [torch.empty_like(local_4R) for _ in range(dist.get_world_size(tp_group))]
        dist.all_gather(parts, local_4R, group=tp_group)
        shards = torch.stack(parts)
    largest, exp_sum, x_exp_sum, target = shards.unbind(1)
    overall = largest.amax(0)
    scale = (largest - overall).exp()
    total = (exp_sum * scale).sum(0)
    return overall + total.log(), target.amax(0), (x_exp_sum * scale).sum(0) / total
