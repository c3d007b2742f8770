"""Truncated importance weights of trainer over rollout (ibpo step 14), which make up for what vLLM and
Megatron compute differently."""

import math
from dataclasses import replace

import numpy as np

from megatron_ibpo.policy.packing import PackedArrays

Factor = tuple[int, float]
"""(index of a sequence in the list that was planned, its weight; the mean where each token has its own)."""

MAX_GAP = 50.0
"""exp of more is beyond any cap, and might be infinite."""


def truncate(arrays: PackedArrays, cap: float, *, token_level: bool) -> tuple[PackedArrays, list[Factor]]:
    """`arrays` with min(exp(log π_old - log π_rollout), cap) multiplied in, and the factors.

    Args:
        arrays: with the rollout's and old log-probs; neither may be missing where there are sequences.
        token_level: each token's own goes onto its weight; else that of the mean over the sequence's trained
            tokens onto the sequence's.
    """
    if not len(arrays.members_S):
        return arrays, []
    assert arrays.old_logprobs_R is not None
    assert arrays.rollout_logprobs_R is not None  # `plan_update` checked
    gaps_R = arrays.old_logprobs_R.astype(np.float64) - arrays.rollout_logprobs_R
    bounds = arrays.response_lengths_S.cumsum()[:-1]
    masks = np.split(arrays.loss_mask_R, bounds)
    if token_level:
        factors_R = np.minimum(np.exp(np.minimum(gaps_R, MAX_GAP)), cap)
        before_R = 1.0 if arrays.token_weights_R is None else arrays.token_weights_R
        means = [_mean(own[mask]) for own, mask in zip(np.split(factors_R, bounds), masks, strict=True)]
        weighted = replace(arrays, token_weights_R=factors_R * before_R)
    else:
        gaps = [_mean(own[mask]) for own, mask in zip(np.split(gaps_R, bounds), masks, strict=True)]
        means = [min(math.exp(min(gap, MAX_GAP)), cap) for gap in gaps]
        weighted = replace(arrays, weights_S=arrays.weights_S * means)
    return weighted, list(zip(arrays.members_S.tolist(), means, strict=True))


def _mean(values: np.ndarray) -> float:
    # in order, so that it does not depend on how numpy sums in blocks
    return sum(values.tolist()) / len(values)
