"""Loss and gradients do not depend on how a batch is cut: into micro-batches here, over ranks in `live`."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_ibpo.config import Config
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.own_policy import Update, difference, own_update, reading_off
from megatron_ibpo.verify.rows import NotCheckedError, Row, measured

BOUND, RECURRENT_BOUND = 2e-4, 1e-3
"""Largest relative difference of a gradient in float32; delta nets sum long products."""
METRICS = ("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "kl")
NEXT = "the loss's divisor and weights (--loss-aggregation, --loss-variant, --token-credit)"


def check_split(subject: Subject) -> Iterator[Row]:
    """Compare one micro-batch of everything with other cuts, other orders and other neighbours."""
    sequences = subject.sequences
    config = from_engine(reading_off(subject.small))
    together = own_update(_cut(config, 10**9), sequences)
    half = sum(s.num_tokens for s in sequences) // 3
    longest = max(s.num_tokens for s in sequences)
    cuts = {
        "a micro-batch for each sequence": (_cut(config, 1), sequences),
        f"micro-batches of {half} tokens": (_cut(config, max(half, longest)), sequences),
        "the reverse order": (_cut(config, 10**9), sequences[::-1]),
    }
    for name, (cut, own) in cuts.items():
        yield compared(f"split: {name}", own_update(cut, own), together, subject)


def compared(check: str, own: Update, expected: Update, subject: Subject) -> Row:
    """Return the row of two updates that should be the same."""
    if not expected.metrics.get("grad_norm"):
        raise NotCheckedError("the batch has no gradient")
    gap, where, count = difference(own.change, expected.change, max(own.rounding, expected.rounding))
    scalars = {
        name: abs(own.metrics[name] - expected.metrics[name]) / max(abs(expected.metrics[name]), 1e-2)
        for name in METRICS
        if name in expected.metrics
    }
    worst = max(scalars, key=lambda name: scalars[name])
    if scalars[worst] > gap:
        gap, where = scalars[worst], f"metric {worst}"
    return measured(
        check, gap, bound_of(subject), "float32, relative to the largest of a tensor",
        f"gradients of {count} tensors and {len(scalars)} metrics; furthest: {where or 'none'}", NEXT,
    )  # fmt: skip


def bound_of(subject: Subject) -> float:
    """Return the largest difference that float32 explains."""
    return RECURRENT_BOUND if subject.foundation.shape.is_recurrent else BOUND


def from_engine(config: Config) -> Config:
    """Return the settings with ratios to the engine's log-probs, so that the clip acts in a first update.
    Importance corrections read those already."""
    if config.loss.corrections or config.loss.use_routing_replay:
        return config
    return replace(config, loss=replace(config.loss, old_logprobs="engine"))


def _cut(config: Config, max_tokens: int) -> Config:
    model = replace(config.model, max_tokens_per_gpu=max_tokens, log_probs_max_tokens_per_gpu=None)
    return replace(config, model=model)
