"""The terms of each loss variant and the KL estimators as Triton functions, under the names of
`megatron_ibpo.loss.VARIANTS` and `megatron_ibpo.loss.objective.KL_ESTIMATORS`.

    token_term(log_ratio, logprob, advantage, *params) -> (value, derivative by the log-prob, clipped)
    sequence_term(log_ratio, length, advantage, *params) -> (loss, derivative by the log-ratio, clipped)
    KL estimator(gap) -> (value, derivative)

all on fp32 tensors, elementwise; params in the order of the registry. What the arguments mean, and the
formulas with their sources, is said there; here is the same with the derivatives written out.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

MAX_LOG_RATIO = tl.constexpr(80.0)


class KernelTerms(NamedTuple):
    """The `@triton.jit` functions of one variant; None for a term that it does not have."""

    token_term: Any = None
    sequence_term: Any = None


@triton.jit
def bounded_ratio(log_ratio):
    """(exp of the log-ratio, its derivative), constant from exp(80) on."""
    ratio = tl.exp(tl.minimum(log_ratio, MAX_LOG_RATIO))
    return ratio, tl.where(log_ratio > MAX_LOG_RATIO, 0.0, ratio)


@triton.jit
def clip(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def clipped_surrogate(log_ratio, other, advantage, eps_low, eps_high):
    ratio, slope = bounded_ratio(log_ratio)
    plain = ratio * advantage
    bounded = clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage
    clipped = bounded < plain
    return -tl.minimum(plain, bounded), tl.where(clipped, 0.0, -slope * advantage), clipped


@triton.jit
def dual_clip(log_ratio, other, advantage, eps_low, eps_high, bound):
    loss, slope, clipped = clipped_surrogate(log_ratio, other, advantage, eps_low, eps_high)
    ceiling = -bound * advantage
    beyond = (advantage < 0) & (loss > ceiling)
    return tl.where(beyond, ceiling, loss), tl.where(beyond, 0.0, slope), clipped | beyond


@triton.jit
def cispo(log_ratio, logprob, advantage, eps_low, eps_high):
    ratio, _ = bounded_ratio(log_ratio)
    bounded = clip(ratio, 1.0 - eps_low, 1.0 + eps_high)
    slope = -bounded * advantage
    return tl.where(bounded == 0, 0.0, slope * logprob), slope, bounded != ratio


@triton.jit
def sapo(log_ratio, logprob, advantage, tau_pos, tau_neg):
    ratio, slope = bounded_ratio(log_ratio)
    tau = tl.where(advantage > 0, tau_pos, tau_neg)
    gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
    value = -4.0 / tau * gate * advantage
    return value, -4.0 * gate * (1.0 - gate) * slope * advantage, advantage != advantage


@triton.jit
def gmpo_token(log_ratio, logprob, advantage, eps_low, eps_high):
    cut = tl.where(advantage > 0, tl.minimum(log_ratio, eps_high), tl.maximum(log_ratio, -eps_low))
    clipped = cut != log_ratio
    return cut, tl.where(clipped, 0.0, 1.0), clipped


@triton.jit
def gmpo_sequence(log_ratio, length, advantage, eps_low, eps_high):
    ratio, slope = bounded_ratio(log_ratio)
    return -ratio * advantage, -slope * advantage, advantage != advantage


@triton.jit
def nll(log_ratio, logprob, advantage):
    return -advantage * logprob, -advantage, advantage != advantage


KERNEL_TERMS: dict[str, KernelTerms] = {
    "gspo": KernelTerms(sequence_term=clipped_surrogate),
    "gspo-token": KernelTerms(token_term=clipped_surrogate),
    "gspo-dual-clip": KernelTerms(sequence_term=dual_clip),
    "grpo": KernelTerms(token_term=clipped_surrogate),
    "ppo-clip": KernelTerms(token_term=clipped_surrogate),
    "dual-clip": KernelTerms(token_term=dual_clip),
    "dapo": KernelTerms(token_term=clipped_surrogate),
    "dr-grpo": KernelTerms(token_term=clipped_surrogate),
    "cispo": KernelTerms(token_term=cispo),
    "sapo": KernelTerms(token_term=sapo),
    "gmpo": KernelTerms(token_term=gmpo_token, sequence_term=gmpo_sequence),
    "nll": KernelTerms(token_term=nll),
}


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
