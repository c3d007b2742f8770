"""Loss variants: each a few lines of torch, registered by name.

A variant says what one sequence, or one token, loses; everything else (log-probs, packing, masks,
aggregation, tensor parallelism) is the same for all of them. Gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["VARIANTS", "Variant"]

# exp(80) is the last power of ten below float32's largest: ratios beyond it are clipped anyway, and an
# infinite one would turn a zero coefficient into NaN.
MAX_LOG_RATIO = 80.0

Term = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Variant:
    """One of the two terms, and the parameters it takes.

    sequence_term(log_ratio_S, advantages_S, **params) -> (loss_S, clipped_S): log_ratio_S is the mean over
        the sequence's response tokens of log π - log π_old.
    token_term(log_ratio_N, advantages_N, **params) -> (loss_N, clipped_N): the sequence's loss is the mean
        over its response tokens.
    """

    sequence_term: Term | None = None
    token_term: Term | None = None
    params: Mapping[str, float] = field(default_factory=dict)
    """Parameters with their defaults; unknown ones are refused."""

    def __post_init__(self) -> None:
        if (self.sequence_term is None) == (self.token_term is None):
            raise ValueError("a variant has either a sequence_term or a token_term")


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-min(s·A, clip(s, 1-ε_low, 1+ε_high)·A) with s = exp(log_ratio).

    Of a sequence it is GSPO (arXiv 2507.18071, eq. 5), of a token PPO's clip as in GRPO.
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


VARIANTS: dict[str, Variant] = {
    "gspo": Variant(sequence_term=clipped_surrogate, params={"eps_low": 3e-4, "eps_high": 4e-4}),
    "grpo": Variant(token_term=clipped_surrogate, params={"eps_low": 0.2, "eps_high": 0.2}),
}
