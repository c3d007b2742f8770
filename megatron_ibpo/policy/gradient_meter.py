"""Signal-to-noise ratio of a step's policy gradient over its P prompts: SNR = (|g|² - v/P) / v.

g is the mean of one gradient per prompt, v their spread (the trace of their covariance), and v/P the part of
|g|² due to noise alone. Both scale with the loss, and the ratio does not: only it may be compared between
objectives.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_ibpo.loss import Objective
from megatron_ibpo.policy.loss_objective import aggregation, gspo_objective
from megatron_ibpo.policy.packing import PackedArrays, packed
from megatron_ibpo.policy.planning import Block, RankMeasure
from megatron_ibpo.policy.trainer import Trainer

Packed = tuple[int, Sequence[PackedArrays]]
"""(prompts of a block, this rank's sequences of it that have a gradient)."""


@dataclass(frozen=True)
class GradientNoise:
    """Mean and spread of P per-prompt gradients."""

    snr: float | None
    """signal / variance; None if the gradients do not differ at all."""
    variance: float
    """v: trace of the covariance of a prompt's gradient, unbiased."""
    signal: float
    """|g|² of the expected gradient, unbiased; noise can make it negative."""
    prompts: int
    blocks: int

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the metrics, first those that may be compared between objectives."""
        snr = {} if self.snr is None else {f"{prefix}gradient_snr": self.snr}
        return snr | {f"{prefix}gradient_variance": self.variance, f"{prefix}gradient_signal": self.signal}


def compare_with_gspo(trainer: Trainer, share: RankMeasure) -> dict[str, float]:
    """Return metrics of the run's objective on the step's training data and, with the prefix gspo_, of GSPO
    on the same responses with plain advantages. Collective."""
    config = trainer.config
    objective = trainer.objective(aggregation(config, share.mean_length))
    gspo = gspo_objective(config, trainer.world.device)
    trained = ((block.prompts, trainer.as_trained(block.cut)) for block in share.trained)
    noise = measure_gradient(trainer, trained, objective)
    # with the same sequences and loss the result is the same, and on-policy ratios of 1 reach no clip
    ratios_are_1 = config.loss.old_logprobs == "recompute"
    same_loss = (
        replace(objective, params=gspo.params) == gspo and not config.loss.corrections and ratios_are_1
    )
    plain = share.trained if share.plain is None else share.plain
    reference = (
        noise if same_loss and share.plain is None else measure_gradient(trainer, as_sampled(plain), gspo)
    )
    return (noise.metrics() if noise else {}) | (reference.metrics("gspo_") if reference else {})


def as_sampled(blocks: Iterable[Block]) -> Iterator[Packed]:
    """Yield one block at a time, at ratio 1 and without a reference policy."""
    for block in blocks:
        yield block.prompts, packed(block.cut.micro_batches)


def measure_gradient(
    trainer: Trainer, blocks: Iterable[Packed], objective: Objective
) -> GradientNoise | None:
    """Measure at the trainer's present weights, which do not change; None without blocks. Collective.

    All ranks work on one block of prompts at a time, as on a mini-batch: one forward and backward pass over
    the sequences, and memory for one more copy of the gradients.

    `blocks` are this rank's part of a whole step's, two or more, with training weights. Without old log-probs
    ratios are 1. A prompt whose advantages are all 0 counts, with a gradient of 0. With as many blocks as
    prompts, the estimate is exact; two halves are the cheapest unbiased one.
    """
    sizes, squares = [], []
    total = [torch.zeros_like(buffer) for buffer in trainer.gradient_buffers()]
    for prompts, live in blocks:
        sizes.append(prompts)
        if not live:
            squares.append(0.0)
            continue
        trainer.accumulate_gradients(live, objective)
        for buffer, summed in zip(trainer.gradient_buffers(), total, strict=True):
            summed += buffer
        squares.append(trainer.gradient_norm() ** 2)
    if not sizes:
        return None
    for buffer, summed in zip(trainer.gradient_buffers(), total, strict=True):
        buffer.copy_(summed)
    return estimate_noise(sizes, squares, trainer.gradient_norm() ** 2)


def estimate_noise(sizes: Sequence[int], squares: Sequence[float], total_square: float) -> GradientNoise:
    """Estimate the noise of one prompt's gradient from squared norms of blocks of prompts.

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
