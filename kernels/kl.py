"""The KL estimators of `megatron_ibpo.loss.kl` as Triton functions: gap -> (value, derivative)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["KL_TERMS"]

MAX_LOG_RATIO = tl.constexpr(80.0)


@triton.jit
def k1(gap):
    return gap, gap * 0.0 + 1.0


@triton.jit
def k2(gap):
    return 0.5 * gap * gap, gap


@triton.jit
def k3(gap):
    inverse = tl.exp(tl.minimum(-gap, MAX_LOG_RATIO))
    return inverse - 1.0 + gap, tl.where(-gap > MAX_LOG_RATIO, 1.0, 1.0 - inverse)


KL_TERMS: dict[str, Any] = {"k1": k1, "k2": k2, "k3": k3}
