"""Loss and gradients do not depend on how a batch is cut: into micro-batches here, over ranks in `checks`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_ibpo.basics.records import TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.one_rank import (
    Update,
    gradient_of,
    largest_difference,
    policy_on_one_rank,
    step_of,
    update_on_one_rank,
    with_lr,
)
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured

BOUND, RECURRENT_BOUND = 2e-4, 1e-3
"""Largest relative difference of a gradient in float32; delta nets sum long products."""
SMALL_LR = 1e-2
"""Learning rate of a step after which log-probs have changed in proportion to it."""
NO_KL = 1e-6
"""Nats that float32 makes of a KL of 0."""
METRICS = ("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "kl")
NEXT = "the loss's divisor and weights (--loss-aggregation, --loss-variant, --token-credit)"


def check_split(subject: Subject) -> Iterator[Row]:
    """Compare one micro-batch of everything with other cuts, other orders and other neighbours."""
    sequences = subject.sequences
    yield _credit_row(subject)
    config = from_engine(with_lr(subject.small))
    uncut = update_on_one_rank(_cut(config, 10**9), sequences)
    half = sum(s.num_tokens for s in sequences) // 3
    longest = max(s.num_tokens for s in sequences)
    cuts = {
        "a micro-batch for each sequence": (_cut(config, 1), sequences),
        f"micro-batches of {half} tokens": (_cut(config, max(half, longest)), sequences),
        "the reverse order": (_cut(config, 10**9), sequences[::-1]),
    }
    for name, (cut_config, batch) in cuts.items():
        yield compared(f"split: {name}", update_on_one_rank(cut_config, batch), uncut, subject)
    if subject.small.model.lora_rank is None:  # adapters' gradient is not that of the weights
        yield _clipping_row(subject, config, uncut)
    yield _repeated_row(subject)
    yield _direction_row(subject)
    if subject.small.loss.kl_coef:
        yield _kl_row(subject)


def _clipping_row(subject: Subject, config: Config, unclipped: Update) -> Row:
    """The norm is that of the gradient that a step's change shows, and half of it as --clip-grad halves the
    gradient."""
    norm = unclipped.metrics["grad_norm"]
    gradient = {
        name: gradient_of(change)
        for name, change in unclipped.change.items()
        if not name.endswith("e_score_correction_bias")  # it has a rule of its own
    }
    clipped = replace(config, optimizer=replace(config.optimizer, clip_grad=norm / 2))
    changed = update_on_one_rank(clipped, subject.sequences).change
    expected = {name: step_of(tensor / 2) for name, tensor in gradient.items()}
    gap, furthest, _ = largest_difference({n: changed[n] for n in expected}, expected, unclipped.rounding)
    exact_norm = math.sqrt(sum(tensor.double().square().sum().item() for tensor in gradient.values()))
    if abs(exact_norm - norm) / norm > gap:
        gap, furthest = abs(exact_norm - norm) / norm, f"the norm, {norm:.4g} in place of {exact_norm:.4g}"
    return measured(
        "split: clipping", gap, 5 * bound_of(subject), "float32, relative to the largest of a tensor",
        f"gradients with --clip-grad {norm / 2:.3g}; furthest: {furthest or 'none'}", "the gradient's norm",
    )  # fmt: skip


def _repeated_row(subject: Subject) -> Row:
    """A step that moves nothing leaves nothing behind: taken twice, it has the same metrics."""
    config = with_lr(from_engine(subject.small), 1e-12)
    with policy_on_one_rank(config) as (policy, _):
        first, second = (policy.update(subject.sequences) for _ in range(2))
    gaps = _scalar_gaps(second, first)
    worst = max(gaps, key=lambda name: gaps[name])
    return measured(
        "split: the same step twice", gaps[worst], bound_of(subject), "float32",
        f"relative difference of {len(gaps)} metrics; furthest: {worst}",
        "gradients that are not zeroed, dropout, what a step leaves behind",
    )  # fmt: skip


def _direction_row(subject: Subject) -> Row:
    """Check that what earns more has the larger advantage, and that an update makes it likelier."""
    sequences = [s for s in subject.batch.credited if s.has_advantage and s.loss_mask.any()]
    with policy_on_one_rank(with_lr(subject.small, SMALL_LR)) as (policy, _):
        initial = policy.logprobs(sequences)
        policy.update([
            replace(s, rollout_logprobs=logprobs) for s, logprobs in zip(sequences, initial, strict=True)
        ])  # fmt: skip
        updated = policy.logprobs(sequences)
    products = [
        ((s.advantage if s.token_advantages is None else s.token_advantages) * np.subtract(new, old))[
            s.loss_mask
        ]
        for s, old, new in zip(sequences, initial, updated, strict=True)
    ]
    # a sum over tokens, and one over sequences: --loss-aggregation decides which of them an update raises
    rise = max(float(sum(p.sum() for p in products)), float(sum(p.mean() for p in products)))
    faults = [] if rise > 0 else [f"advantage times rise of the log-prob is {rise:.2g}"]
    right, wrong = (_mean_advantage(sequences, right=right) for right in (True, False))
    if right < wrong:
        faults.append(f"right responses have the advantage {right:.3g}, and wrong ones {wrong:.3g}")
    return counted_faults(
        "split: direction", faults,
        f"an update with {len(sequences)} sequences raises those whose advantage is positive",
    )  # fmt: skip


def _kl_row(subject: Subject) -> Row:
    """The reference policy is the initial one, and stays it: a first step has a KL of 0, and a second has
    none of 0."""
    with policy_on_one_rank(with_lr(subject.small, SMALL_LR)) as (policy, _):
        first, second = (policy.update(subject.batch.credited)["kl"] for _ in range(2))
    faults = [] if abs(first) < NO_KL else [f"a first step has {first:.2g}"]
    faults += [] if abs(second) > NO_KL else [f"a second step has {second:.2g}"]
    return counted_faults(
        "split: KL", faults, f"KL to the initial policy: {first:.1g} and, after a step, {second:.1g} nats"
    )


def _mean_advantage(sequences: Sequence[TrainSequence], *, right: bool) -> float:
    """Return the mean advantage of the made-up responses that are right, or wrong (`Subject.batch`), where it
    comes from comparing rewards and is one number."""
    advantages = [
        s.advantage
        for s in sequences
        if s.kind == "response" and s.token_advantages is None and (s.index % 2 == 0) == right
    ]
    return sum(advantages) / max(1, len(advantages))


def _credit_row(subject: Subject) -> Row:
    """Advantages and weights do not depend on the order of the groups, and a failed verifier gives none."""
    batch = subject.batch
    reordered = {_identity(s): s for s in batch.credited_reversed}
    faults = [
        f"prompt {s.prompt_index}, {s.kind} {s.index}: advantage {s.advantage:.6g}, or none or another"
        for s in batch.credited
        if _identity(s) not in reordered or not _same_credit(s, reordered[_identity(s)])
    ]
    faults += [
        f"prompt {s.prompt_index}, response {s.index} has the advantage {s.advantage:.3g}, and no reward"
        for s in batch.credited
        if s.has_advantage and _identity(s) in batch.unscored
    ]
    reason = f"{len(batch.credited)} sequences, of groups in either order"
    return counted_faults("split: credit", faults, reason)


def _identity(s: TrainSequence) -> tuple[int, str, int]:
    return s.prompt_index, s.kind, s.index


def _same_credit(first: TrainSequence, second: TrainSequence) -> bool:
    pairs = [
        (getattr(first, name), getattr(second, name))
        for name in ("advantage", "weight", "token_weights", "token_advantages")
    ]
    return all(
        a is b if a is None or b is None else np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs
    )


def compared(check: str, update: Update, expected: Update, subject: Subject) -> Row:
    """Return the row of two updates that should be the same."""
    if not expected.metrics.get("grad_norm"):
        raise NotCheckedError("the batch has no gradient")
    rounding = max(update.rounding, expected.rounding)
    gap, furthest, count = largest_difference(update.change, expected.change, rounding)
    scalars = _scalar_gaps(update.metrics, expected.metrics)
    worst = max(scalars, key=lambda name: scalars[name])
    if scalars[worst] > gap:
        gap, furthest = scalars[worst], f"metric {worst}"
    return measured(
        check, gap, bound_of(subject), "float32, relative to the largest of a tensor",
        f"gradients of {count} tensors and {len(scalars)} metrics; furthest: {furthest or 'none'}", NEXT,
    )  # fmt: skip


def _scalar_gaps(metrics: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    """Return the relative difference of each metric."""
    return {
        name: abs(metrics[name] - expected[name]) / max(abs(expected[name]), 1e-2)
        for name in METRICS
        if name in expected
    }


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
