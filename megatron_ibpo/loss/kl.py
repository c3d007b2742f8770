"""Per-token estimators of KL(π ‖ π_ref) from log-probs of sampled tokens.

k1, k2 and k3 of John Schulman, "Approximating KL Divergence" (2020): d = log π - log π_ref of the sampled
token. In expectation over π k1 and k3 are the divergence; the gradient of k1 as a penalty is 0 in
expectation, that of k2 is the divergence's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from megatron_ibpo.loss.variants import MAX_LOG_RATIO

__all__ = ["KL_ESTIMATORS", "KLEstimator"]

KLEstimator = Literal["k1", "k2", "k3"]


def _k3(gap: Tensor) -> Tensor:
    return (-gap).clamp(max=MAX_LOG_RATIO).exp() - 1.0 + gap


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: gap,
    "k2": lambda gap: 0.5 * gap * gap,
    "k3": _k3,
}
"""Name → function of d [N]."""
