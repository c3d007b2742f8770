"""Loss of tokens that another distribution wrote: policy shaping (LUFFY, arXiv 2504.14945)."""

import math

import torch
from torch import Tensor

GAMMA = 0.1
"""γ, as published: a token of probability .1 has half of the surrogate's height."""


def shaped_surrogate(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A·f(π) of each token, f(p) = p / (p + γ), which is sigmoid(log p - log γ).

    The probability under the policy in training stands in place of a ratio, for what wrote the token is taken
    to have been sure of it. The gradient by log p, -A·γp/(p + γ)², is largest at p = γ and fades for tokens
    that the policy writes anyway. No clip.
    """
    return -advantages * torch.sigmoid(logprobs - math.log(GAMMA))
