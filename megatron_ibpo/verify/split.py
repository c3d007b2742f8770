"""Loss and gradients do not depend on how a batch is cut: into micro-batches here, over ranks in `live`."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_ibpo.basics.records import TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.own_policy import Update, difference, own_update, reading_off
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured

BOUND, RECURRENT_BOUND = 2e-4, 1e-3
"""Largest relative difference of a gradient in float32; delta nets sum long products."""
METRICS = ("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "kl")
NEXT = "the loss's divisor and weights (--loss-aggregation, --loss-variant, --token-credit)"


def check_split(subject: Subject) -> Iterator[Row]:
    """Compare one micro-batch of everything with other cuts, other orders and other neighbours."""
    sequences = subject.sequences
    yield _credit_row(subject)
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


def _credit_row(subject: Subject) -> Row:
    """Advantages and weights do not depend on the order of the groups."""
    batch = subject.batch
    others = {(s.prompt_index, s.kind, s.index): s for s in batch.credited_reversed}
    pairs = [(s, others.get((s.prompt_index, s.kind, s.index))) for s in batch.credited]
    faults = [
        f"prompt {s.prompt_index}, {s.kind} {s.index}: advantage {s.advantage:.6g}, or none or another"
        for s, other in pairs
        if other is None or not _same_credit(s, other)
    ]
    return counted_faults("split: credit", faults, f"{len(pairs)} sequences, of groups in either order")


def _same_credit(first: TrainSequence, second: TrainSequence) -> bool:
    ours, theirs = (
        [own for own in (s.advantage, s.weight, s.token_weights, s.token_advantages) if own is not None]
        for s in (first, second)
    )
    if len(ours) != len(theirs):
        return False
    return all(np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(ours, theirs, strict=True))


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
