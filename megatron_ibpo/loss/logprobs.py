"""Log-probs and entropies of packed rows: vocabulary-parallel, statistics in fp32, chunk by chunk. The loss,
old log-probs and reference log-probs all come from here, by plain torch or by Triton
(`kernels/row_logprobs.py`)."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.loss.packed_rows import SamplingSets

LossBackend = Literal["auto", "triton", "torch"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ChosenBackend:
    """The back end in use and the reason, in a few words."""

    name: Literal["triton", "torch"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_backend(requested: LossBackend, device: torch.device, dtype: torch.dtype) -> ChosenBackend:
    """Return the implementation for logits of this device and dtype. "auto" takes the kernels on CUDA devices
    if they can be used, otherwise torch; "triton" on a CPU needs Triton's interpreter (TRITON_INTERPRET=1),
    for tests. Raises ValueError for an unknown name, and for "triton" where that is impossible."""
    if requested not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown loss backend {requested!r}; there are 'auto', 'triton' and 'torch'")
    if requested == "torch":
        return ChosenBackend("torch", "as asked")
    if requested == "auto" and device.type != "cuda":
        return ChosenBackend("torch", "no CUDA device")
    obstacle = _obstacle(device, dtype)
    if obstacle is None:
        return ChosenBackend("triton", "as asked" if requested == "triton" else "CUDA device")
    if requested == "triton":
        raise ValueError(f"--loss-backend triton: {obstacle}; use auto or torch")
    return ChosenBackend("torch", obstacle)


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot be used, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels run on CUDA devices, not on {device.type}, except under TRITON_INTERPRET=1"
    if dtype not in _DTYPES:
        return f"the kernels take bfloat16, float16 and float32 logits, not {dtype}"
    return None


CHUNK_BYTES = 64 * 1024**2
"""Bytes of fp32 logits held at once."""


def packed_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    response_mask_N: Tensor | None = None,
    temperature_N: Tensor | float = 1.0,
    sampling_sets: SamplingSets | None = None,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    entropy: bool = True,
    inplace: bool = False,
    backend: LossBackend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each row's target, and the entropy of each row's distribution, at its
    temperature.

    Args:
        logits_NV: [N, V] this rank's columns of the logits; row t predicts targets_N[t].
        targets_N: [N] int64 global vocabulary ids.
        response_mask_N: [N]; rows with 0 are not computed and come out as 0. None: all rows.
        temperature_N: a number or [N]; logits are divided by it.
        sampling_sets: ids over which rows are normalised, the target among them; None: the vocabulary.
        tp_group: process group over which the vocabulary is sharded; one all-gather of row statistics.
        vocab_range: (start, stop) of the global ids in this rank's columns; columns from stop - start on are
            padding and take no part. None: equal contiguous shards.
        entropy: False leaves it out, which is a little faster.
        inplace: let the backward pass write the gradient over the logits, which must not be used after.
        backend: implementation, see `choose_backend`.

    Returns:
        (logprobs_N, entropy_N or None), fp32 (fp64 for fp64 logits). Only the first carries a gradient.

    Raises:
        ValueError: shapes that do not fit, a target outside the whole vocabulary or its row's set (an
            assertion of the device on GPUs), or a backend that cannot be used.
    """
    num_rows = len(logits_NV)
    if targets_N.shape != (num_rows,):
        raise ValueError(f"targets_N has shape {tuple(targets_N.shape)}, logits_NV has {num_rows} rows")
    vocab_range = own_vocab_range(vocab_range, logits_NV.shape[1], tp_group)
    if sampling_sets is not None:
        sampling_sets.check(num_rows, whole_vocab_range(vocab_range, tp_group))
    name = choose_backend(backend, logits_NV.device, logits_NV.dtype).name
    if name == "triton" and logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    rows = (targets_N, response_mask_N, temperature_N, sampling_sets)
    return _RowLogprobs.apply(logits_NV, *rows, tp_group, vocab_range, entropy, inplace, name)


def own_vocab_range(vocab_range: tuple[int, int] | None, num_columns: int, tp_group: Any) -> tuple[int, int]:
    """Return the range of global ids in this rank's columns: as given, or equal contiguous shards. Raises
    ValueError for one that the columns cannot hold."""
    if vocab_range is None:
        rank = 0 if tp_group is None else dist.get_rank(tp_group)
        return rank * num_columns, (rank + 1) * num_columns
    if not 0 < vocab_range[1] - vocab_range[0] <= num_columns:
        raise ValueError(f"vocab_range {vocab_range} does not fit {num_columns} columns")
    return vocab_range


def whole_vocab_range(vocab_range: tuple[int, int], tp_group: Any) -> tuple[int, int] | None:
    """Return the range if it is that of the whole vocabulary; None if other ranks have a part."""
    return vocab_range if tp_group is None or dist.get_world_size(tp_group) == 1 else None


def row_functions(backend: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return a backend's functions for log-probs of rows and for their gradient:

    row_logprobs(logits_NV, targets_N, mask_N, temperature_N, sampling_sets, tp_group, vocab_range, entropy)
        -> (logprobs_N, entropy_N, saved): both are 0 where the mask is 0, and entropy_N is None unless it is
        asked for; `saved` are tensors that the gradient needs.
    write_gradient(out_NV, logits_NV, targets_N, saved, coefficients_N, vocab_range): writes coefficient /
        temperature · (onehot(target) - softmax) of every row, and 0 where the mask or the coefficient is 0,
        or the id is not in the row's set; out_NV may be logits_NV.
    """
    if backend == "triton":
        from megatron_ibpo.kernels.row_logprobs import row_logprobs, write_gradient

        return row_logprobs, write_gradient
    return _row_logprobs, _write_gradient


class _RowLogprobs(torch.autograd.Function):
    """An autograd function that keeps the logits and a few numbers per row; the softmax is recomputed."""

    @staticmethod
    def forward(
        ctx, logits_NV, targets_N, mask_N, temperature_N, sampling_sets, tp_group, vocab_range, entropy,
        inplace, name,
    ):  # fmt: skip
        row_logprobs, ctx.write_gradient = row_functions(name)
        logprobs_N, entropy_N, saved = row_logprobs(
            logits_NV, targets_N, mask_N, temperature_N, sampling_sets, tp_group, vocab_range, entropy
        )
        ctx.save_for_backward(logits_NV, targets_N, *saved)
        ctx.vocab_range, ctx.inplace, ctx.written = vocab_range, inplace, False
        if entropy_N is not None:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, *grads):
        if ctx.written:
            raise RuntimeError(
                "backward ran twice, and with inplace=True the logits are gone; use inplace=False"
            )
        logits_NV, targets_N, *saved = ctx.saved_tensors
        ctx.written = ctx.inplace
        out_NV = logits_NV.detach() if ctx.inplace else torch.empty_like(logits_NV)
        ctx.write_gradient(out_NV, logits_NV, targets_N, saved, grads[0].contiguous(), ctx.vocab_range)
        return out_NV, *(None,) * 9


def _row_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    mask_N: Tensor | None,
    temperature_N: Tensor | float,
    sampling_sets: SamplingSets | None,
    tp_group: Any,
    vocab_range: tuple[int, int],
    entropy: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Compute as `row_functions` says; saved are computed rows, temperatures, the rows' log-sum-exp, sets."""
    device, num_rows = logits_NV.device, len(logits_NV)
    rows_R = torch.arange(num_rows, device=device) if mask_N is None else mask_N.nonzero().squeeze(1)
    temperature_N = torch.as_tensor(temperature_N, device=device).expand(num_rows)
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    local_4R = torch.empty(4, len(rows_R), dtype=dtype, device=device)
    for part, ids_CM in _parts(rows_R, sampling_sets, logits_NV.shape[1]):
        x_CV = _scaled(logits_NV, rows_R[part], temperature_N, vocab_range, dtype, ids_CM)
        target_C = _target_logits(x_CV, targets_N[rows_R[part]], vocab_range, ids_CM)
        local_4R[:, part] = _shard_statistics(x_CV, target_C, entropy)
    log_sum_exp_R, target_logit_R, mean_logit_R = _combine(local_4R, tp_group)
    if not bool(target_logit_R.isfinite().all()) and bool(log_sum_exp_R.isfinite().all()):
        bad_R = targets_N[rows_R][~target_logit_R.isfinite()]
        restriction = "" if sampling_sets is None else ", or not in the sampling set of its row"
        raise ValueError(f"target id {bad_R[0].item()} is outside the vocabulary of the logits{restriction}")
    zeros_N = torch.zeros(num_rows, dtype=dtype, device=device)
    logprobs_N = zeros_N.index_copy(0, rows_R, target_logit_R - log_sum_exp_R)
    entropy_N = zeros_N.index_copy(0, rows_R, log_sum_exp_R - mean_logit_R) if entropy else None
    sets = () if sampling_sets is None else sampling_sets.tensors
    return logprobs_N, entropy_N, (rows_R, temperature_N, log_sum_exp_R, *sets)


def _write_gradient(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    saved: tuple[Tensor, ...],
    coefficients_N: Tensor,
    vocab_range: tuple[int, int],
) -> None:
    rows_R, temperature_N, log_sum_exp_R, *sets = saved
    start, stop = vocab_range
    width = stop - start
    scale_R = (coefficients_N[rows_R] / temperature_N[rows_R]).to(log_sum_exp_R.dtype)
    for part, ids_CM in _parts(rows_R, SamplingSets(*sets) if sets else None, logits_NV.shape[1]):
        rows_C, targets_C = rows_R[part], targets_N[rows_R[part]]
        x_CV = _scaled(logits_NV, rows_C, temperature_N, vocab_range, log_sum_exp_R.dtype, ids_CM)
        grad_CV = (x_CV - log_sum_exp_R[part, None]).exp_().neg_()
        if ids_CM is None:
            is_own, column = _own_ids(targets_C, start, stop)
            grad_CV[is_own, column[is_own]] += 1.0
            grad_CV *= scale_R[part, None]
            out_NV[rows_C, :width] = grad_CV.to(out_NV.dtype)
        else:
            grad_CV = (grad_CV + (ids_CM == targets_C[:, None])) * scale_R[part, None]
            is_own, column = _own_ids(ids_CM, start, stop)
            out_NV[rows_C] = 0
            out_NV[rows_C[:, None].expand_as(is_own)[is_own], column[is_own]] = grad_CV[is_own].to(
                out_NV.dtype
            )
    other_rows = torch.ones(len(out_NV), dtype=torch.bool, device=out_NV.device)
    other_rows[rows_R] = False
    out_NV[other_rows] = 0
    out_NV[:, width:] = 0


Part = slice | Tensor
"""Some of the computed rows, as an index of arrays [R]."""


def _parts(
    rows_R: Tensor, sampling_sets: SamplingSets | None, num_columns: int
) -> Iterator[tuple[Part, Tensor | None]]:
    """Yield parts of the rows whose fp32 logits fit CHUNK_BYTES: rows normalised over the whole vocabulary,
    with None, then restricted ones with their sets, padded."""
    if sampling_sets is None:
        yield from ((part, None) for part in _chunks(len(rows_R), num_columns))
        return
    sets = sampling_sets.of_rows(rows_R)
    counts_R = sets.stops_N - sets.starts_N
    whole_R, restricted_R = (counts_R == 0).nonzero().squeeze(1), counts_R.nonzero().squeeze(1)
    yield from ((whole_R[part], None) for part in _chunks(len(whole_R), num_columns))
    restricted_R = restricted_R[counts_R[restricted_R].argsort()]  # alike in size, so that padding is short
    largest = int(counts_R.max()) if len(restricted_R) else 1
    for part in _chunks(len(restricted_R), largest):
        yield restricted_R[part], sets.of_rows(restricted_R[part]).padded()


def _chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Return slices of rows whose fp32 logits fit CHUNK_BYTES."""
    size = max(1, CHUNK_BYTES // (4 * num_columns))
    return [slice(first, first + size) for first in range(0, num_rows, size)]


def _scaled(
    logits_NV: Tensor,
    rows_C: Tensor,
    temperature_N: Tensor,
    vocab_range: tuple[int, int],
    dtype: torch.dtype,
    ids_CM: Tensor | None,
) -> Tensor:
    """Return the rows' logits over their temperature: [C, V], or [C, M] of the ids, -inf on other shards."""
    if ids_CM is None:
        x_CV = logits_NV[rows_C, : vocab_range[1] - vocab_range[0]]
    else:
        is_own, column = _own_ids(ids_CM, *vocab_range)
        x_CV = logits_NV[rows_C[:, None], column].masked_fill(~is_own, -torch.inf)
    return x_CV.to(dtype) / temperature_N[rows_C, None].to(dtype)


def _own_ids(ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return (which ids are in this rank's columns, their column there; 0 for the others)."""
    is_own = (ids >= start) & (ids < stop)
    return is_own, torch.where(is_own, ids - start, 0)


def _target_logits(
    x_CV: Tensor, targets_C: Tensor, vocab_range: tuple[int, int], ids_CM: Tensor | None
) -> Tensor:
    """Return the targets' logits, -inf for those of other shards."""
    if ids_CM is not None:
        return x_CV.masked_fill(ids_CM != targets_C[:, None], -torch.inf).amax(1)
    is_own, column = _own_ids(targets_C, *vocab_range)
    return x_CV.gather(1, column[:, None]).squeeze(1).masked_fill(~is_own, -torch.inf)


def _shard_statistics(x_CV: Tensor, target_C: Tensor, entropy: bool) -> Tensor:
    """Return [4, C]: max, Σ exp(x - max), Σ x·exp(x - max) for the entropy, target logit. A row whose ids are
    all on other shards has -inf, 0, 0, -inf."""
    lowest = torch.finfo(x_CV.dtype).min  # a logit of -inf has weight 0, and 0 times -inf is not 0
    largest = x_CV.amax(1)
    weights_CV = (x_CV - largest[:, None].clamp(min=lowest)).exp_()
    total = weights_CV.sum(1)
    moment = weights_CV.mul_(x_CV.clamp_(min=lowest)).sum(1) if entropy else torch.zeros_like(total)
    return torch.stack([largest, total, moment, target_C])


def _combine(local_4R: Tensor, tp_group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-sum-exp, target logit, mean logit) over all vocabulary shards."""
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
