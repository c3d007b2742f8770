"""The loss and log-probs from hidden states, with the logits of response rows alone in the LM head's
products. Rows without a gradient (weight or advantage 0) are in neither product of the backward pass."""

from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.loss.linear_loss import check_head, move_to_front
from megatron_ibpo.loss.logprobs import LossBackend, choose_backend, packed_logprobs
from megatron_ibpo.loss.objective import Objective
from megatron_ibpo.loss.packed_rows import LossRows
from megatron_ibpo.loss.segments import LossStats, checked_rows, loss_of_logprobs


def head_policy_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    rows: LossRows,
    objective: Objective,
    *,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
) -> tuple[Tensor, LossStats]:
    """Return `policy_loss` of the logits hidden_NH @ weight_VH.T, for every variant; arguments as in
    `linear_policy_loss`. Raises ValueError as `policy_loss`, and for a head that does not fit, or fp16."""
    rows = checked_rows(rows, len(hidden_NH), objective)
    check_head(hidden_NH, weight_VH, rows.targets_N)
    places_L = rows.gradient_places(kl_coef=objective.kl_coef).on_device
    shards = {"tp_group": tp_group, "vocab_range": vocab_range, "backend": objective.backend}
    logprobs_N, entropy_N = _head_logprobs(hidden_NH, weight_VH, rows, places_L, entropy=True, **shards)
    assert entropy_N is not None
    backend = choose_backend(objective.backend, hidden_NH.device, hidden_NH.dtype).name
    return loss_of_logprobs(logprobs_N, entropy_N, rows, objective, backend)


@torch.no_grad()
def head_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    rows: LossRows,
    *,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    backend: LossBackend = "auto",
) -> Tensor:
    """Return the log-probs that `head_policy_loss` finds, bit for bit, without a gradient: [N] fp32 (fp64 for
    fp64), 0 in rows outside of the responses. Raises ValueError as it does."""
    check_head(hidden_NH, weight_VH, rows.targets_N)
    shards = {"tp_group": tp_group, "vocab_range": vocab_range, "backend": backend}
    return _head_logprobs(hidden_NH, weight_VH, rows, rows.response_rows()[:0], entropy=False, **shards)[0]


def _head_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, rows: LossRows, places_L: Tensor, *, entropy: bool, **shards: Any
) -> tuple[Tensor, Tensor | None]:
    """Return [N] log-probs and entropies, 0 outside of the responses. `places_L` are those among the response
    rows of the ones with a gradient."""
    rows_R, sets, temperature_N = rows.response_rows(), rows.sampling_sets, rows.temperature_of_row()
    logprobs_R, entropy_R = packed_logprobs(
        _Logits.apply(hidden_NH.index_select(0, rows_R), weight_VH, places_L),
        rows.targets_N[rows_R],
        temperature_N=temperature_N[rows_R] if torch.is_tensor(temperature_N) else temperature_N,
        sampling_sets=None if sets is None else sets.of_rows(rows_R),
        entropy=entropy,
        inplace=True,
        **shards,
    )
    zeros_N = logprobs_R.new_zeros(len(hidden_NH))
    logprobs_N = zeros_N.index_copy(0, rows_R, logprobs_R)
    return logprobs_N, None if entropy_R is None else zeros_N.index_copy(0, rows_R, entropy_R)


class _Logits(torch.autograd.Function):
    """hidden_RH @ weight_VH.T. The logits' gradient must be 0 outside places_L; its memory is reused."""

    @staticmethod
    def forward(ctx, hidden_RH, weight_VH, places_L):
        ctx.save_for_backward(hidden_RH, weight_VH, places_L)
        return hidden_RH @ weight_VH.t()

    @staticmethod
    def backward(ctx, *grads):
        hidden_RH, weight_VH, places_L = ctx.saved_tensors
        grad_LV = move_to_front(grads[0], places_L)
        of_hidden_RH, of_weight_VH = None, None
        if ctx.needs_input_grad[0]:
            of_hidden_RH = torch.zeros_like(hidden_RH).index_copy_(0, places_L, grad_LV @ weight_VH)
        if ctx.needs_input_grad[1]:
            of_weight_VH = grad_LV.t() @ hidden_RH[places_L]
        return of_hidden_RH, of_weight_VH, None
