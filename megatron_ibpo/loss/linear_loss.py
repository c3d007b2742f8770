"""The loss with the LM head fused in: the logits are computed chunk by chunk and never held whole.

The gradient of row t's logits is c_t·(onehot - softmax), and c_t, one number, is known when the row's whole
sequence has been seen (`coefficients`). So a chunk is turned in place into P = (onehot - softmax)/temperature
and used at once: for the hidden gradient P·W, whose rows are scaled at the end, and the weight's,
Pᵀ·(c_t·hidden), for rows whose c_t is known. Rows of the one open sequence go into a second fp32 matrix,
which is scaled and added when that ends.

Three products of 2·N·H·V operations over N response rows, of which two leave out rows without a gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ibpo.loss.coefficients import ChunkCoefficients, RowCoefficients, Step, schedule
from megatron_ibpo.loss.logprobs import (
    LossBackend,
    choose_backend,
    own_vocab_range,
    row_functions,
    whole_vocab_range,
)
from megatron_ibpo.loss.objective import Objective
from megatron_ibpo.loss.packed_rows import GradientPlaces, LossRows, SamplingSets
from megatron_ibpo.loss.segments import LossStats, checked_rows, segment_loss

CHUNK_ROWS = 4096
"""Response rows whose logits are held at once: enough for the products to run at full speed."""
MOVED_ROWS = 512
"""Rows that `move_to_front` copies at once."""

Head = Callable[[Tensor], tuple[Tensor, Tensor, Callable[[], Tensor]]]
"""Rows → (log-probs, entropies, a function that turns their logits into (onehot - softmax)/temperature)."""


def linear_policy_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    rows: LossRows,
    objective: Objective,
    *,
    chunk: int = CHUNK_ROWS,
    into_main_grad: bool = False,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
) -> tuple[Tensor, LossStats]:
    """Return `policy_loss` of the logits hidden_NH @ weight_VH.T.

    Only response rows are computed. Both gradients are ready after the forward pass; backward multiplies them
    by the incoming gradient, so loss scaling works, and can run once.

    Args:
        hidden_NH: [N, H] bf16, fp32 or fp64 (not fp16, in which scaled rows would underflow), whole on every
            rank of tp_group. Its gradient is that of this rank's columns: take it from Megatron's
            `copy_to_tensor_model_parallel_region` or `gather_from_sequence_parallel_region`, which sum it.
        weight_VH: [V, H] this rank's rows of the output layer, or of the embedding if they are tied.
        chunk: response rows whose logits are held at once.
        into_main_grad: add the weight's gradient to `weight_VH.main_grad` in fp32 (Megatron's gradient
            accumulation fusion) and return zeros to autograd, in place of a gradient in the weight's dtype.
        tp_group, vocab_range: as in `packed_logprobs`.

    Raises:
        ValueError: as `policy_loss`; fp16; dtypes that differ; a variant whose token term sees its sequence's
            mean (gspo-token: gspo is the same loss for advantages [S]); into_main_grad without a main_grad.
    """
    rows = checked_rows(rows, len(hidden_NH), objective)
    check_head(hidden_NH, weight_VH, rows.targets_N)
    _check_chunk(chunk)
    if objective.variant.sequence_ratio:
        raise ValueError(
            f"loss variant {objective.name!r} cannot be fused with the LM head: its token term needs a mean "
            "that only later chunks complete. Use policy_loss, or gspo, the same for advantages [S]"
        )
    if into_main_grad and getattr(weight_VH, "main_grad", None) is None:
        raise ValueError("into_main_grad=True needs weight_VH.main_grad, which Megatron's DDP makes")
    spread = rows.temperature_of_row()
    backend = choose_backend(objective.backend, hidden_NH.device, hidden_NH.dtype).name
    of_rows = (rows.targets_N, spread, rows.sampling_sets)
    head = _head(hidden_NH, weight_VH, *of_rows, tp_group, vocab_range, backend)
    loss, *statistics = _LinearLoss.apply(
        hidden_NH, weight_VH, head, rows, objective, chunk, into_main_grad, torch.is_grad_enabled()
    )
    return loss, LossStats(*statistics)


@torch.no_grad()
def linear_packed_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    response_mask_N: Tensor,
    response_rows_R: Tensor | None = None,
    temperature_N: Tensor | float = 1.0,
    sampling_sets: SamplingSets | None = None,
    chunk: int = CHUNK_ROWS,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    backend: LossBackend = "auto",
) -> Tensor:
    """Return what `packed_logprobs` finds in the logits hidden_NH @ weight_VH.T, without a gradient: [N] fp32
    (fp64 for fp64), 0 where response_mask_N is 0. Arguments as there and in `linear_policy_loss`;
    `response_rows_R` [R] int64 are the rows that the mask keeps, for whose number the host would wait
    otherwise. Raises ValueError as they do."""
    check_head(hidden_NH, weight_VH, targets_N)
    _check_chunk(chunk)
    name = choose_backend(backend, hidden_NH.device, hidden_NH.dtype).name
    of_rows = (targets_N, temperature_N, sampling_sets)
    head = _head(hidden_NH, weight_VH, *of_rows, tp_group, vocab_range, name)
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    logprobs_N = torch.zeros(len(hidden_NH), dtype=dtype, device=hidden_NH.device)
    rows_R = response_mask_N.nonzero().squeeze(1) if response_rows_R is None else response_rows_R
    for rows_C in rows_R.split(chunk):
        logprobs_N[rows_C] = head(rows_C)[0]
    return logprobs_N


def check_head(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> None:
    """Raise ValueError for a head that does not fit the hidden states or the targets."""
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden_NH {tuple(hidden_NH.shape)} and weight_VH {tuple(weight_VH.shape)} do not share H"
        )
    if targets_N.shape != (len(hidden_NH),):
        raise ValueError(f"targets_N has shape {tuple(targets_N.shape)}, hidden_NH has {len(hidden_NH)} rows")
    if hidden_NH.dtype != weight_VH.dtype or hidden_NH.dtype == torch.float16:
        raise ValueError(
            f"hidden_NH is {hidden_NH.dtype} and weight_VH {weight_VH.dtype}: they must agree, and fp16 is "
            "not supported, since rows scaled by small coefficients would underflow in it"
        )


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, must be at least 1")


def _head(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor | float,
    sampling_sets: SamplingSets | None,
    tp_group: Any,
    vocab_range: tuple[int, int] | None,
    backend: str,
) -> Head:
    temperature_N = torch.as_tensor(temperature_N, device=hidden_NH.device).expand(len(hidden_NH))
    vocab_range = own_vocab_range(vocab_range, len(weight_VH), tp_group)
    if sampling_sets is not None:
        sampling_sets.check(len(hidden_NH), whole_vocab_range(vocab_range, tp_group))
    row_logprobs, write_gradient = row_functions(backend)

    def head(rows_C: Tensor) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        logits_CV, targets_C = hidden_NH[rows_C] @ weight_VH.t(), targets_N[rows_C]
        sets = None if sampling_sets is None else sampling_sets.of_rows(rows_C)
        logprobs_C, entropy_C, saved = row_logprobs(
            logits_CV, targets_C, None, temperature_N[rows_C], sets, tp_group, vocab_range, True
        )

        def overwrite() -> Tensor:
            ones_C = torch.ones_like(logprobs_C)
            write_gradient(logits_CV, logits_CV, targets_C, saved, ones_C, vocab_range)
            return logits_CV

        return logprobs_C, entropy_C, overwrite

    return head


class _LinearLoss(torch.autograd.Function):
    """An autograd function with both gradients in the forward pass; backward scales them."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head, rows, objective, chunk, into_main_grad, grad_enabled):
        needs_gradients = (ctx.needs_input_grad[0] and grad_enabled, ctx.needs_input_grad[1] and grad_enabled)
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        rows_R = rows.response_rows()
        logprobs_N = torch.zeros(len(hidden_NH), dtype=dtype, device=hidden_NH.device)
        entropy_N = torch.zeros_like(logprobs_N)
        gradients = _Gradients(hidden_NH, weight_VH, needs_gradients, dtype)
        coefficients = RowCoefficients(rows, objective, rows_R, dtype)
        places = rows.gradient_places(kl_coef=objective.kl_coef)
        for step in schedule(rows, rows_R, coefficients.ends, chunk):
            rows_C = rows_R[step.start : step.stop]
            logprobs_N[rows_C], entropy_N[rows_C], overwrite = head(rows_C)
            coefficients.see(step, logprobs_N[rows_C], entropy_N[rows_C])
            # a sequence may end without a row of this rank's, if other ranks share it
            if any(needs_gradients) and (len(rows_C) or coefficients.open is not None):
                places_C, chunk_coefficients = _with_gradient(step, places, coefficients.of_chunk(step))
                gradients.add(rows_C[places_C], move_to_front(overwrite(), places_C), chunk_coefficients)
        gradients.finish(rows_R, coefficients.of_all_rows())
        loss, *statistics = segment_loss(logprobs_N, rows, objective, entropy_N)
        ctx.gradients, ctx.main_grad = gradients, weight_VH.main_grad if into_main_grad else None
        outputs = (logprobs_N, entropy_N, *statistics)
        ctx.mark_non_differentiable(*(output for output in outputs if output is not None))
        return (loss, *outputs)

    @staticmethod
    def backward(ctx, *grads):
        if ctx.gradients is None:
            raise RuntimeError("backward ran twice, and the first one has used the gradients up")
        scale, gradients, ctx.gradients = grads[0], ctx.gradients, None
        hidden_grad, weight_grad = gradients.of_hidden_NH, gradients.of_weight_VH
        if hidden_grad is not None:
            hidden_grad.mul_(scale)
        if weight_grad is not None:
            weight_grad.mul_(scale)
            if ctx.main_grad is not None:
                ctx.main_grad.add_(weight_grad)
                weight_grad = torch.zeros_like(gradients.weight_VH)
            weight_grad = weight_grad.to(gradients.weight_VH.dtype)
        return (hidden_grad, weight_grad, *[None] * 6)


def _with_gradient(
    step: Step, places: GradientPlaces, chunk: ChunkCoefficients
) -> tuple[Tensor, ChunkCoefficients]:
    """Return the places of a step's rows with a gradient among all of its rows, and their coefficients."""
    bounds = (step.start, step.start + len(chunk.final_C), step.stop - len(chunk.open_C), step.stop)
    first, final, opened, last = np.searchsorted(places.on_host, bounds).tolist()
    coefficients = replace(
        chunk,
        final_C=chunk.final_C[places.on_device[first:final] - bounds[0]],
        open_C=chunk.open_C[places.on_device[opened:last] - bounds[2]],
    )
    return places.on_device[first:last] - step.start, coefficients


def move_to_front(matrix_RV: Tensor, places_L: Tensor) -> Tensor:
    """Return [L, V], the rows places_L (int64, rising) of a matrix, over the front of its own memory."""
    if len(places_L) < len(matrix_RV):
        for first in range(0, len(places_L), MOVED_ROWS):
            places_C = places_L[first : first + MOVED_ROWS]
            matrix_RV[first : first + len(places_C)] = matrix_RV[places_C]  # these rows lie here or behind
    return matrix_RV[: len(places_L)]


class _Gradients:
    """The two gradients under construction."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, needs_gradients: tuple[bool, bool], dtype: torch.dtype
    ):
        self.hidden_NH, self.weight_VH = hidden_NH, weight_VH
        self.of_hidden_NH = torch.zeros_like(hidden_NH) if needs_gradients[0] else None
        self.of_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_gradients[1] else None
        self.open_VH: Tensor | None = None
        """The weight gradient of the open sequence, without its slope; created when first needed."""
        self.open_is_empty = True

    def add(self, rows_C: Tensor, p_CV: Tensor, coefficients: ChunkCoefficients) -> None:
        """Add the rows' part. p_CV: (onehot - softmax)/temperature of the rows."""
        if self.of_hidden_NH is not None:
            self.of_hidden_NH[rows_C] = p_CV @ self.weight_VH
        if self.of_weight_VH is None:
            return
        if coefficients.closing is not None and self.open_VH is not None and not self.open_is_empty:
            self.of_weight_VH.add_(self.open_VH.mul_(coefficients.closing))
            self.open_is_empty = True
        hidden_CH = self.hidden_NH[rows_C]
        final, opened = len(coefficients.final_C), len(rows_C) - len(coefficients.open_C)
        _accumulate(self.of_weight_VH, p_CV[:final], hidden_CH[:final], coefficients.final_C)
        if opened == len(rows_C):
            return
        if self.open_VH is None:
            self.open_VH = torch.zeros_like(self.of_weight_VH)
        elif self.open_is_empty:
            self.open_VH.zero_()
        self.open_is_empty = False
        _accumulate(self.open_VH, p_CV[opened:], hidden_CH[opened:], coefficients.open_C)

    def finish(self, rows_R: Tensor, coefficients_R: Tensor) -> None:
        self.open_VH = None
        if self.of_hidden_NH is not None:
            for part in range(0, len(rows_R), 8192):
                rows = rows_R[part : part + 8192]
                scaled = self.of_hidden_NH[rows] * coefficients_R[part : part + 8192, None]
                self.of_hidden_NH[rows] = scaled.to(self.of_hidden_NH.dtype)


def _accumulate(sum_VH: Tensor, p_CV: Tensor, hidden_CH: Tensor, scales_C: Tensor) -> None:
    """Compute sum += Pᵀ·(scales·hidden), in the sum's precision."""
    scaled_CH = (hidden_CH * scales_C[:, None]).to(p_CV.dtype)
    if p_CV.dtype == sum_VH.dtype:
        sum_VH.addmm_(p_CV.t(), scaled_CH)
    elif sum_VH.is_cuda:  # GPU only: bf16 factors into an fp32 sum
        torch.ops.aten.addmm.dtype_out(sum_VH, p_CV.t(), scaled_CH, sum_VH.dtype, out=sum_VH)
    else:
        sum_VH.addmm_(p_CV.t().to(sum_VH.dtype), scaled_CH.to(sum_VH.dtype))
