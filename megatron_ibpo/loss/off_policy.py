"""Loss of tokens sampled from another distribution: policy shaping (LUFFY, arXiv 2504.14945)."""

import math

import torch
from torch import Tensor

GAMMA = 0.1
"""γ, as published: a token of probability .1 has half of the surrogate's height."""


def shaped_surrogate(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return -A·f(π) of each token, f(p) = p / (p + γ), which is sigmoid(log p - log γ).

    The probability under the policy in training replaces the ratio: the token's source is assumed to have
    been certain of it. The gradient by log p, -A·γp/(p + γ)², is largest at p = γ and fades for tokens that
    the policy writes anyway. No clip.
    """
    return -advantages * torch.sigmoid(logprobs - math.log(GAMMA))
