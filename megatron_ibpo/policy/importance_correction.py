"""Importance corrections: weights for tokens and sequences that were not drawn from the policy in training,
by the ratio r = π_prox / π_behave of the trainer's own policy at its first optimizer step and the engine that
sampled.

TIS (ibpo step 14) takes min(r, clip) of each token, IcePop r inside [low, high], else 0, and rejection leaves
out a sequence whose exp(mean log r) lies outside. They scale gradients and the reported loss; divisors count
tokens that are cut.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ibpo.config import LossConfig
from megatron_ibpo.policy.packing import PackedArrays

MAX_GAP = 50.0
"""Limit on log-ratios, beyond which exp exceeds any bound and may be infinite, or 0."""

Ratios = npt.NDArray[np.float64]


class Corrected(NamedTuple):
    """The outcome of importance correction for one sequence."""

    member: int
    """Its index in the planned list."""
    tokens: int
    """Number of its tokens in the loss."""
    tokens_cut: int
    """Number of tokens whose own ratio was truncated or masked."""
    weight: float
    """Sum of its tokens' weights; 0 if it was rejected."""


def is_rejected(log_ratios: Ratios, low: float, high: float) -> bool:
    """Return whether the geometric mean of the ratios of a sequence's tokens lies outside [low, high]."""
    mean = _sum(log_ratios) / len(log_ratios)
    return not low <= math.exp(min(mean, MAX_GAP)) <= high


def correct(arrays: PackedArrays, loss: LossConfig) -> tuple[PackedArrays, list[Corrected]]:
    """Return `arrays` with the run's corrections in the weights of tokens and sequences, and the outcome for
    each sequence, which needs old and rollout log-probs and a token in the loss."""
    if not len(arrays.members_S):
        return arrays, []
    assert arrays.old_logprobs_R is not None
    assert arrays.rollout_logprobs_R is not None  # `plan_update` checked
    gaps_R = arrays.old_logprobs_R.astype(np.float64) - arrays.rollout_logprobs_R
    gaps_R[~arrays.loss_mask_R] = 0.0  # context has no log-prob of the policy
    if arrays.off_policy_R is not None:
        gaps_R[arrays.off_policy_R] = 0.0  # what was sampled from another prompt has none of this one
    bounds = loss.sequence_rejection
    kept_S = [bounds is None or not is_rejected(gaps, *bounds) for gaps in _in_loss(arrays, gaps_R)]
    weights_R, cut_R = _token_weights(gaps_R, loss)
    parts = zip(
        arrays.members_S.tolist(), _in_loss(arrays, weights_R), _in_loss(arrays, cut_R), kept_S, strict=True
    )
    outcomes = [
        Corrected(member, len(weights), int(np.count_nonzero(cut)), _sum(weights) if is_kept else 0.0)
        for member, weights, cut, is_kept in parts
    ]
    factors_R = weights_R if arrays.token_weights_R is None else weights_R * arrays.token_weights_R
    corrected = replace(
        arrays,
        token_weights_R=factors_R,
        importance_weights_R=weights_R if loss.use_tis or loss.icepop is not None else None,
        weights_S=arrays.weights_S * kept_S,
    )
    return corrected, outcomes


def _token_weights(gaps_R: Ratios, loss: LossConfig) -> tuple[Ratios, npt.NDArray[np.bool_]]:
    """Return each token's weight (1 without a correction of tokens), and whether it is not the ratio."""
    ratios_R = np.exp(np.clip(gaps_R, -MAX_GAP, MAX_GAP))
    if loss.use_tis:
        weights_R = np.minimum(ratios_R, loss.tis_clip)
    elif loss.icepop is not None:
        low, high = loss.icepop
        weights_R = np.where((ratios_R >= low) & (ratios_R <= high), ratios_R, 0.0)
    else:
        return np.ones_like(ratios_R), np.zeros(len(ratios_R), np.bool_)
    return weights_R, weights_R != ratios_R


def correction_metrics(outcomes: Sequence[Corrected]) -> dict[str, float]:
    """Return shares and the mean weight over all corrected sequences, summed in an order that does not depend
    on the layout; empty if there are none."""
    if not outcomes:
        return {}
    tokens = sum(outcome.tokens for outcome in outcomes)
    return {
        "importance_weight_mean": sum(outcome.weight for outcome in outcomes) / tokens,
        "importance_token_cut_fraction": sum(outcome.tokens_cut for outcome in outcomes) / tokens,
        "importance_sequence_cut_fraction": sum(outcome.weight == 0 for outcome in outcomes) / len(outcomes),
    }


def _in_loss(arrays: PackedArrays, values_R: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return each sequence's values at the tokens in the loss."""
    bounds = arrays.response_lengths_S.cumsum()[:-1]
    pairs = zip(np.split(values_R, bounds), np.split(arrays.loss_mask_R, bounds), strict=True)
    return [values[mask] for values, mask in pairs]


def _sum(values: Ratios) -> float:
    # in order, so that it does not depend on how numpy sums in blocks
    return sum(values.tolist())
