"""How noisy the policy gradient of a step is, over its prompts.

A step's gradient is the mean of one gradient a prompt. How far these differ (v, the trace of their
covariance) against how long their mean is says how much of a step is signal. Both scale with the loss, their
ratio does not, so the ratio is what may be compared between objectives:

    SNR = (|g|² - v/P) / v

over P prompts; v/P is what noise alone adds to |g|², so that pure noise reads 0 and not 1/P.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from megatron_ibpo.loss import Objective
from megatron_ibpo.policy.objective import aggregation, gspo_objective
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.records import TrainSequence

__all__ = ["GradientNoise", "compare_with_gspo", "estimate_noise", "measure_gradient"]


@dataclass(frozen=True)
class GradientNoise:
    """What P per-prompt gradients have in common, and how far they differ."""

    snr: float | None
    """signal / variance; None where the gradients do not differ at all."""
    variance: float
    """v: trace of the covariance of a prompt's gradient, unbiased."""
    signal: float
    """|g|² of the expected gradient, unbiased: may be below 0 on noise."""
    prompts: int
    blocks: int

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """For the metrics log; what may be compared between objectives first."""
        snr = {} if self.snr is None else {f"{prefix}gradient_snr": self.snr}
        return snr | {
            f"{prefix}gradient_variance": self.variance,
            f"{prefix}gradient_signal": self.signal,
        }


def compare_with_gspo(
    trainer: Trainer,
    sequences: Sequence[TrainSequence],
    plain: Sequence[TrainSequence],
    blocks: int,
) -> dict[str, float]:
    """Metrics of the run's objective on `sequences`, and under the prefix gspo_ of GSPO on `plain`.

    Args:
        sequences: what the step trains on.
        plain: the same responses with plain advantages and no corrections.
    """
    config = trainer.config
    weighted = trainer.weighted(sequences)
    own = trainer.objective(aggregation(config, sequences))
    gspo = gspo_objective(config, trainer.world.device)
    noise = measure_gradient(trainer, weighted, own, blocks)
    # of the same sequences and loss it is the same, and on-policy ratios of 1 reach no clip
    is_gspo = replace(own, params=gspo.params) == gspo and weighted == list(plain)
    reference = noise if is_gspo else measure_gradient(trainer, plain, gspo, blocks)
    return (noise.metrics() if noise else {}) | (reference.metrics("gspo_") if reference else {})


def measure_gradient(
    trainer: Trainer, sequences: Sequence[TrainSequence], objective: Objective, blocks: int
) -> GradientNoise | None:
    """Measure at the trainer's present weights, which stay as they are; only gradient buffers are used.

    The gradient of each block of prompts is computed by itself, under any layout: all ranks work on one block
    at a time, as they do on a mini-batch. It costs one forward and backward of the sequences, and memory for
    one more copy of the gradients. Collective.

    Args:
        sequences: a whole step's; weights as they are trained with. Ratios are 1: old log-probs are the
            forward pass's own. A prompt whose advantages are all 0 counts, with a gradient of 0.
        blocks: at most so many parts are made of the prompts. As many as prompts: each is one, exact. 2: two
            halves, the cheapest unbiased estimate, for models where a backward pass costs much.

    Returns:
        None for fewer than two prompts, of which nothing can be said.
    """
    prompts = sorted({s.group for s in sequences})
    count = min(blocks, len(prompts))
    if count < 2:
        return None
    cuts = [round(i * len(prompts) / count) for i in range(count + 1)]
    sizes, squares = [], []
    total = [torch.zeros_like(buffer) for buffer in trainer.gradient_buffers()]
    for first, last in pairwise(cuts):
        chosen = set(prompts[first:last])
        live = [s for s in sequences if s.group in chosen and s.has_advantage]
        sizes.append(len(chosen))
        squares.append(_add_gradient(trainer, live, objective, total) if live else 0.0)
    for buffer, summed in zip(trainer.gradient_buffers(), total, strict=True):
        buffer.copy_(summed)
    return estimate_noise(sizes, squares, trainer.gradient_norm() ** 2)


def _add_gradient(
    trainer: Trainer, sequences: list[TrainSequence], objective: Objective, total: Iterable[torch.Tensor]
) -> float:
    """Add the gradient of `sequences` to `total`; returns its squared norm."""
    trainer.accumulate_gradients(sequences, objective, own_old_logprobs=True)
    for buffer, summed in zip(trainer.gradient_buffers(), total, strict=True):
        summed += buffer
    return trainer.gradient_norm() ** 2


def estimate_noise(sizes: Sequence[int], squares: Sequence[float], total_square: float) -> GradientNoise:
    """The noise of one prompt's gradient from squared norms of blocks of prompts.

    With b_j the mean gradient of the m_j prompts of block j and g that of all P, Σ m_j |b_j - g|² has the
    expectation (k - 1) v over k blocks: the between-groups sum of squares of an analysis of variance. With
    k = P these are the prompts themselves; with two halves a and b the signal is the product a·b.

    Args:
        sizes: m_j, prompts of each block, k ≥ 2 of them.
        squares: |G_j|² of each block's part of the step's gradient, G_j = b_j m_j / P.
        total_square: |g|², g = Σ G_j.
    """
    prompts, blocks = sum(sizes), len(sizes)
    within = prompts**2 * sum(square / size for size, square in zip(sizes, squares, strict=True))
    variance = (within - prompts * total_square) / (blocks - 1)
    signal = total_square - variance / prompts
    return GradientNoise(signal / variance if variance > 0 else None, variance, signal, prompts, blocks)
