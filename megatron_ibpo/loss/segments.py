"""The loss over packed sequences from the log-probs of their rows, and one entry point for torch and the
Triton kernels. This plain torch is the definition of what `kernels/segment_loss.py` does."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ibpo.loss.logprobs import choose_backend, packed_logprobs
from megatron_ibpo.loss.objective import KL_ESTIMATORS, Objective
from megatron_ibpo.loss.packed_rows import LossRows, sum_over_ranks
from megatron_ibpo.loss.term_inputs import SequenceInputs, TokenInputs, apply_term, further_inputs

GAMMA = 0.1
"""γ, as published: a token of probability .1 has half of the surrogate's height."""


def shaped_surrogate(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return -A·f(π) of each token, f(p) = p / (p + γ), which is sigmoid(log p - log γ). The probability
    under the policy in training replaces the ratio: the token's source is assumed to have been certain of it.
    The gradient by log p is largest at p = γ and fades for tokens that the policy writes anyway. No clip."""
    return -advantages * torch.sigmoid(logprobs - math.log(GAMMA))


def segment_loss(
    logprobs_N: Tensor,
    rows: LossRows,
    objective: Objective,
    entropy_N: Tensor | None = None,
    value_weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return Σ_i w_i/D_i (n_i·L_i + kl_coef·Σ_t kl_t).

    L_i is the sequence's loss by the variant, or the mean of its tokens' shaped surrogates if it is
    off-policy. n_i is its number of response tokens, w_i its weight and D_i the aggregation's divisor (n_i
    for "sequence-mean").

    Args:
        logprobs_N: fp32 or fp64; the loss is differentiable in it.
        rows: as `LossRows.checked` returns them.
        entropy_N: entropies of the rows, for variants that read them.
        value_weights_N: as `weighted_value` has them.

    Returns:
        (scalar loss, the same on every rank of cp_group; then as in `LossStats` mean_log_ratio_S, clipped,
        kl_N).
    """
    variant, mask_N, dtype = objective.variant, rows.response_mask_N, logprobs_N.dtype
    sequence_N, size = rows.sequence_of_row(), rows.num_sequences
    advantages = rows.advantages.to(dtype)
    per_token = len(advantages) != size  # one row per sequence means the same either way
    advantages_N = advantages if per_token else advantages[sequence_N]

    old_N = logprobs_N.detach() if rows.old_logprobs_N is None else rows.old_logprobs_N.to(dtype)
    weighted_N = _scale_gradient(logprobs_N, rows.token_weights_N)
    log_ratio_N = torch.where(mask_N, weighted_N - old_N, 0.0)
    kl_N = _kl_estimate(logprobs_N, rows, objective)

    further_N = further_inputs(rows, variant.token_inputs, entropy_N, dtype)

    def token_values(ratio_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token term's values, times their weights if there is no sequence term, and clips."""
        assert variant.token_term is not None
        seen_N = torch.where(live_N, ratio_N, 0.0)
        inputs = TokenInputs(seen_N, weighted_N, advantages_N, **further_N)
        values_N, clipped_N = apply_term(variant.token_term, inputs, objective.params)
        return weighed(values_N), clipped_N

    def weighed(values_N: Tensor) -> Tensor:
        if value_weights_N is not None and variant.sequence_term is None:
            values_N = values_N * value_weights_N.to(dtype)
        return torch.where(live_N, values_N, 0.0)

    def sums(*columns_N: Tensor) -> Tensor:
        """Return [K, S], sums over the response rows of each sequence, on all ranks."""
        masked = torch.where(mask_N, torch.stack(columns_N), 0.0)
        zeros = torch.zeros(len(columns_N), size, dtype=dtype, device=mask_N.device)
        return sum_over_ranks(zeros.index_add(1, sequence_N, masked), rows.cp_group)

    live_N = mask_N & (advantages_N != 0)
    columns = [mask_N.to(dtype), log_ratio_N] + ([] if kl_N is None else [kl_N])
    token_clipped = None
    if variant.token_term is not None and not variant.sequence_ratio:
        value_N, token_clipped = token_values(log_ratio_N)
        columns.append(value_N)
    off_policy_S = rows.off_policy_S
    if off_policy_S is not None:
        columns.append(torch.where(live_N, shaped_surrogate(weighted_N, advantages_N), 0.0))
    count_S, log_ratio_sum_S, *optional_sums = sums(*columns)
    kl_sum_S = None if kl_N is None else optional_sums.pop(0)
    shaped_sum_S = None if off_policy_S is None else optional_sums.pop()
    value_sum_S = optional_sums.pop() if optional_sums else None
    n_S = count_S.clamp(min=1.0)
    mean_log_ratio_S = log_ratio_sum_S / n_S
    if variant.sequence_ratio:
        own_N = mean_log_ratio_S.detach()[sequence_N] + _gradient_alone(log_ratio_N)
        value_N, token_clipped = token_values(own_N)
        value_sum_S = sums(value_N)[0]
    mean_S = mean_log_ratio_S if value_sum_S is None else value_sum_S / n_S

    if variant.sequence_term is None:
        loss_S, sequence_clipped = mean_S, None
    else:
        live_S = (advantages != 0) & (count_S > 0)
        inputs = SequenceInputs(torch.where(live_S, mean_S, 0.0), n_S, advantages)
        loss_S, sequence_clipped = apply_term(variant.sequence_term, inputs, objective.params)
        loss_S, sequence_clipped = torch.where(live_S, loss_S, 0.0), sequence_clipped & live_S
        if value_weights_N is not None:
            loss_S = loss_S * sums(value_weights_N.to(dtype))[0] / n_S
    if off_policy_S is not None and shaped_sum_S is not None:
        loss_S = torch.where(off_policy_S, shaped_sum_S / n_S, loss_S)
    assert rows.sequence_weights_S is not None
    weights_S = rows.sequence_weights_S.to(dtype)
    divisor_S = divisors(objective.aggregation, count_S, weights_S)
    loss_S = loss_S * (count_S / divisor_S)
    if kl_sum_S is not None:
        loss_S = loss_S + objective.kl_coef * kl_sum_S / divisor_S
    clipped = sequence_clipped if token_clipped is None else token_clipped & live_N
    assert clipped is not None
    if off_policy_S is not None:
        clipped = clipped & ~(off_policy_S if token_clipped is None else off_policy_S[sequence_N])
    kl_N = None if kl_N is None else kl_N.detach()
    return (weights_S * loss_S).sum(), mean_log_ratio_S.detach(), clipped, kl_N


def weighted_value(
    logprobs_N: Tensor,
    rows: LossRows,
    objective: Objective,
    importance_weights_N: Tensor,
    entropy_N: Tensor | None = None,
) -> Tensor:
    """Return the value of the loss with the importance weights of its tokens, without a gradient: a token
    term is multiplied by its token's weight, a sequence term by the mean over its response tokens.

    `LossRows.token_weights_N` scale the gradient alone; the losses that verl, TRL and slime report include
    importance weights. `logprobs_N` and `entropy_N`, for variants that read it, are as in `LossStats`.
    """
    with torch.no_grad():
        checked = checked_rows(rows, len(logprobs_N), objective)
        return segment_loss(logprobs_N, checked, objective, entropy_N, importance_weights_N)[0]


def checked_rows(rows: LossRows, num_rows: int, objective: Objective) -> LossRows:
    """Return the rows in the form that this objective takes; raises as `LossRows.checked`."""
    per_token = objective.variant.takes_token_advantages
    return rows.checked(num_rows, kl_coef=objective.kl_coef, per_token=per_token)


def divisors(aggregation: str | float, counts_S: Tensor, weights_S: Tensor) -> Tensor:
    """Return the divisor of each sequence's sum, [S], never 0; for "token-mean" the weighted mean length."""
    if aggregation == "sequence-mean":
        return counts_S.clamp(min=1.0)
    if aggregation == "token-mean":
        mean = (weights_S * counts_S).sum() / weights_S.sum()
        return torch.where(mean > 0, mean, 1.0).expand_as(counts_S)
    return torch.full_like(counts_S, float(aggregation))


def _scale_gradient(values_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """Return the same values, with their gradient scaled by the weights."""
    if weights_N is None:
        return values_N
    return values_N.detach() + weights_N.to(values_N.dtype) * _gradient_alone(values_N)


def _gradient_alone(values_N: Tensor) -> Tensor:
    """Return 0 with the gradient of the values; an infinite one, log of a probability of 0, has none."""
    finite_N = torch.where(values_N.isfinite(), values_N, 0.0)
    return finite_N - finite_N.detach()


def _kl_estimate(logprobs_N: Tensor, rows: LossRows, objective: Objective) -> Tensor | None:
    if rows.ref_logprobs_N is None:
        return None
    gap = logprobs_N - rows.ref_logprobs_N.to(logprobs_N.dtype)
    return KL_ESTIMATORS[objective.kl](torch.where(rows.response_mask_N, gap, 0.0))


@dataclass(frozen=True)
class LossStats:
    """Statistics of the loss; nothing here carries a gradient."""

    logprobs_N: Tensor
    """Log-prob of each response token under the current policy; 0 in other rows."""
    entropy_N: Tensor
    """Entropy (nats) of the distribution in each response row, over its sampling set; 0 in other rows."""
    mean_log_ratio_S: Tensor
    """Mean over response tokens of log π - log π_old; exp of it is GSPO's s_i."""
    clipped: Tensor
    """bool, [N] for variants with a token term, otherwise [S]: True where the clip takes effect."""
    kl_N: Tensor | None
    """KL estimate of each response token against ref_logprobs_N, 0 in other rows; None without
    ref_logprobs_N."""


def policy_loss(
    logits_NV: Tensor,
    rows: LossRows,
    objective: Objective,
    *,
    tp_group: Any = None,
    vocab_range: tuple[int, int] | None = None,
    inplace: bool = False,
) -> tuple[Tensor, LossStats]:
    """Return Σ_i sequence_weights_i · loss_i over S packed sequences, and its statistics.

    Sequences without response rows have a loss of exactly 0; so has the policy term of those with advantage
    0. Under context parallelism (rows.cp_group) loss and [S] statistics are the same on every rank, and the
    gradient is that of the whole loss, for one all-reduce of a few floats per sequence; gspo-token takes
    another one.

    Args:
        logits_NV: [N, V] this rank's vocabulary columns; row t predicts rows.targets_N[t].
        tp_group, vocab_range, inplace: as in `packed_logprobs`.

    Raises:
        ValueError: shapes that do not fit, cut sequences, a target outside the vocabulary or its sampling
            set, a backend that cannot be used.
    """
    rows = checked_rows(rows, len(logits_NV), objective)
    backend = choose_backend(objective.backend, logits_NV.device, logits_NV.dtype).name
    logprobs_N, entropy_N = packed_logprobs(
        logits_NV,
        rows.targets_N,
        response_mask_N=rows.response_mask_N,
        temperature_N=rows.temperature_of_row(),
        sampling_sets=rows.sampling_sets,
        tp_group=tp_group,
        vocab_range=vocab_range,
        inplace=inplace,
        backend=backend,
    )
    assert entropy_N is not None
    return loss_of_logprobs(logprobs_N, entropy_N, rows, objective, backend)


def loss_of_logprobs(
    logprobs_N: Tensor, entropy_N: Tensor, rows: LossRows, objective: Objective, backend: str
) -> tuple[Tensor, LossStats]:
    """Return the loss, differentiable in the log-probs, of `checked_rows`, and its statistics."""
    if backend == "triton" and rows.off_policy_S is None:  # the kernel has no shaped surrogate
        from megatron_ibpo.kernels.segment_loss import triton_segment_loss

        further_N = further_inputs(rows, objective.variant.token_inputs, entropy_N, torch.float32)
        loss, mean_log_ratio_S, clipped, kl_N = triton_segment_loss(logprobs_N, rows, objective, further_N)
    else:
        loss, mean_log_ratio_S, clipped, kl_N = segment_loss(logprobs_N, rows, objective, entropy_N)
    return loss, LossStats(logprobs_N.detach(), entropy_N, mean_log_ratio_S, clipped, kl_N)
