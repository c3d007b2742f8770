"""Log-probs and entropies of packed rows by the kernels: the autograd function of statistics and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.kernels.logits_gradient import write_gradient
from megatron_ibpo.kernels.row_statistics import row_statistics


class RowLogprobs(torch.autograd.Function):
    """(logprobs_N, entropy_N) of logits [N, V]; keeps the logits, and 8 bytes per row more than it returns.

    Arguments as in `megatron_ibpo.loss.packed_logprobs`. Backward reads the logits once and writes once, over
    them if `inplace`.
    """

    @staticmethod
    def forward(ctx, logits_NV, targets_N, mask_N, temperature_N, tp_group, vocab_range, entropy, inplace):
        if logits_NV.stride(1) != 1:
            logits_NV = logits_NV.contiguous()
        temperature = as_temperature(temperature_N, logits_NV.device)
        found = row_statistics(
            logits_NV, targets_N, mask_N, temperature, tp_group, vocab_range, entropy=entropy
        )
        check_targets(found.logprobs, targets_N)
        ctx.save_for_backward(logits_NV, targets_N, temperature, found.shift, found.total)
        ctx.vocab_range, ctx.inplace, ctx.written = vocab_range, inplace, False
        ctx.mark_non_differentiable(found.entropy)
        return found.logprobs, found.entropy if entropy else None

    @staticmethod
    def backward(ctx, *grads):
        if ctx.written:
            raise RuntimeError(
                "backward ran twice, and with inplace=True the logits are gone; use inplace=False"
            )
        logits_NV, targets_N, temperature, shift_N, total_N = ctx.saved_tensors
        ctx.written = ctx.inplace
        out_NV = logits_NV.detach() if ctx.inplace else torch.empty_like(logits_NV)
        coefficients_N = grads[0].contiguous()
        write_gradient(
            out_NV, logits_NV, targets_N, temperature, shift_N, total_N, coefficients_N, ctx.vocab_range
        )
        return out_NV, *(None,) * 7


def as_temperature(temperature: Any, device: torch.device) -> Tensor:
    """A number or [N] as [1] or [N] fp32."""
    return torch.as_tensor(temperature, dtype=torch.float32, device=device).reshape(-1).contiguous()


def check_targets(logprobs_N: Tensor, targets_N: Tensor) -> None:
    """Refuse a target that no shard has: its log-prob is -inf. On a GPU the device asserts, without waiting.

    Raises:
        ValueError: on a CPU, with the id.
    """
    inside = logprobs_N != -torch.inf
    if logprobs_N.is_cuda:
        torch._assert_async(inside.all(), "a target id is outside the vocabulary of the logits")
    elif not bool(inside.all()):
        bad = targets_N[~inside][0].item()
        raise ValueError(f"target id {bad} is outside the vocabulary of the logits")
