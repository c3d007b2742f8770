"""RMS norms of vLLM's layers on CPUs by vLLM's own kernel.

Its CPU layers take seven or more operations of torch for each, which were 9 to 15 % of a decode step
of a small model.
"""

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from megatron_ibpo.engines.vllm.fixes import written_for

Normalized = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Normalized rows; beside a residual also the sum that was normalized."""


@written_for("0.32")
def take_norm_kernels() -> None:
    """Make norms that are built from now on call the kernel."""
    classes: list[tuple[Any, Any]] = [(RMSNorm, _normalize), (GemmaRMSNorm, _normalize_around_one)]
    for norm_class, forward in classes:
        norm_class.forward_cpu = forward


def _normalize(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normalized:
    if not norm.has_weight or norm.variance_size_override is not None:
        normalized: Normalized = norm.forward_native(x, residual)
        return normalized
    return _rms_norm(x, residual, norm.weight.float(), norm.variance_epsilon)


def _normalize_around_one(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normalized:
    return _rms_norm(x, residual, norm.weight.float() + 1.0, norm.variance_epsilon)


def _rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> Normalized:
    """Normalize in float32, as vLLM's layers do: in bfloat16 the kernel would round the sums."""
    rows = x.float() if residual is None else x.float() + residual.float()
    output = torch.empty(rows.shape, dtype=rows.dtype)
    torch.ops._C.rms_norm(output, rows.contiguous(), weight, epsilon)  # it takes rows to follow each other
    normalized = output.to(x.dtype)
    return normalized if residual is None else (normalized, rows.to(x.dtype))
