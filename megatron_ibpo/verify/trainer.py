"""The trainer's loss and gradient in this process: they do not depend on how a batch is cut (`check_split`;
`checks` cuts it over ranks), and are those of transformers in float64 (`check_reference`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_ibpo.basics.records import Floats, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.loss import LossRows, choose_backend, policy_loss
from megatron_ibpo.policy.logits_check import tensor_per_expert, transformers_model
from megatron_ibpo.policy.loss_objective import aggregation, run_objective
from megatron_ibpo.policy.planning import weighted_mean_length
from megatron_ibpo.verify.batch import (
    Subject,
    Update,
    from_engine,
    largest_difference,
    policy_on_one_rank,
    step_of,
    update_on_one_rank,
    with_lr,
)
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, measured

BOUND, RECURRENT_BOUND = 2e-4, 1e-3
"""Largest relative difference of a gradient in float32; delta nets sum long products."""
FLOOR, SPREADS = 2e-5, 20
"""Least bound of a log-prob, and how many times the spread of float32 against float64 is right."""
SMALL_LR, NO_KL = 1e-2, 1e-6
"""Learning rate of a step after which log-probs have changed in proportion to it, and nats that float32 makes
of a KL of 0."""
METRICS = ("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "kl")
SCALE = "float32, relative to the largest of a tensor"

Array = npt.NDArray[np.float64]
LogProbs = Sequence[Array | Floats]


def check_split(subject: Subject) -> Iterator[Row]:
    """Compare one micro-batch of everything with other cuts, other orders and other neighbours."""
    sequences = subject.batch.sequences
    yield _credit_row(subject)
    config = from_engine(subject.small)

    def update(most_tokens: int, batch: Sequence[TrainSequence]) -> Update:
        cut = replace(config.model, max_tokens_per_gpu=most_tokens, log_probs_max_tokens_per_gpu=None)
        return update_on_one_rank(replace(config, model=cut), batch)

    uncut = update(10**9, sequences)
    third = sum(s.num_tokens for s in sequences) // 3
    longest = max(s.num_tokens for s in sequences)
    for name, most_tokens, batch in (
        ("a micro-batch for each sequence", 1, sequences),
        (f"micro-batches of {third} tokens", max(third, longest), sequences),
        ("the reverse order", 10**9, sequences[::-1]),
    ):
        yield compared(f"split: {name}", update(most_tokens, batch), uncut, subject)
    if subject.small.model.lora_rank is None:  # adapters' gradient is not that of the weights
        yield _clipping_row(subject, config, uncut)
    yield _repeated_row(subject, with_lr(config, 1e-12))
    yield _direction_row(subject)
    if subject.small.loss.kl_coef:
        yield _kl_row(subject)


def compared(check: str, update: Update, expected: Update, subject: Subject) -> Row:
    """Return the row of two updates that should be the same."""
    if not expected.metrics.get("grad_norm"):
        raise NotCheckedError("the batch has no gradient")
    rounding = max(update.rounding, expected.rounding)
    gap, furthest, count = largest_difference(update.change, expected.change, rounding)
    scalars = _metric_gaps(update.metrics, expected.metrics)
    worst = max(scalars, key=lambda name: scalars[name])
    if scalars[worst] > gap:
        gap, furthest = scalars[worst], f"metric {worst}"
    return measured(
        check, gap, bound_of(subject), SCALE,
        f"gradients of {count} tensors and {len(scalars)} metrics; furthest: {furthest or 'none'}",
        "the loss's divisor and weights (--loss-aggregation, --loss-variant, --token-credit)",
    )  # fmt: skip


def _metric_gaps(metrics: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    """Return the relative difference of each metric."""
    names = [name for name in METRICS if name in expected]
    return {name: abs(metrics[name] - expected[name]) / max(abs(expected[name]), 1e-2) for name in names}


def bound_of(subject: Subject) -> float:
    """Return the largest difference that float32 explains."""
    return RECURRENT_BOUND if subject.foundation.shape.is_recurrent else BOUND


def _credit_row(subject: Subject) -> Row:
    """Advantages and weights do not depend on the order of the groups, and a failed verifier gives none."""

    def key(s: TrainSequence) -> tuple[int, str, int]:
        return s.prompt_index, s.kind, s.index

    def is_same(first: Any, second: Any) -> bool:
        if first is None or second is None:
            return first is second
        return np.allclose(first, second, rtol=1e-6, atol=1e-9)

    batch = subject.batch
    reordered = {key(s): s for s in batch.credited_reversed}
    fields = ("advantage", "weight", "token_weights", "token_advantages")
    faults = [
        f"prompt {s.prompt_index}, {s.kind} {s.index}: advantage {s.advantage:.6g}, or none or another"
        for s in batch.credited
        if (other := reordered.get(key(s))) is None
        or not all(is_same(getattr(s, name), getattr(other, name)) for name in fields)
    ]
    faults += [
        f"prompt {s.prompt_index}, response {s.index} has the advantage {s.advantage:.3g}, and no reward"
        for s in batch.credited
        if s.has_advantage and key(s) in batch.unscored
    ]
    reason = f"{len(batch.credited)} sequences, of groups in either order"
    return counted_faults("split: credit", faults, reason)


def _clipping_row(subject: Subject, config: Config, unclipped: Update) -> Row:
    """The norm is that of the gradient that a step's change shows, and half of it as --clip-grad halves the
    gradient."""
    norm = unclipped.metrics["grad_norm"]
    gradient = {
        name: change / (1 - change.abs())  # the inverse of `step_of`
        for name, change in unclipped.change.items()
        if not name.endswith("e_score_correction_bias")  # it has a rule of its own
    }
    clipped = replace(config, optimizer=replace(config.optimizer, clip_grad=norm / 2))
    changed = update_on_one_rank(clipped, subject.batch.sequences).change
    expected = {name: step_of(tensor / 2) for name, tensor in gradient.items()}
    gap, furthest, _ = largest_difference({n: changed[n] for n in expected}, expected, unclipped.rounding)
    exact_norm = math.sqrt(sum(tensor.double().square().sum().item() for tensor in gradient.values()))
    if (norm_gap := abs(exact_norm - norm) / norm) > gap:
        gap, furthest = norm_gap, f"the norm, {norm:.4g} in place of {exact_norm:.4g}"
    return measured(
        "split: clipping", gap, 5 * bound_of(subject), SCALE,
        f"gradients with --clip-grad {norm / 2:.3g}; furthest: {furthest or 'none'}", "the gradient's norm",
    )  # fmt: skip


def _repeated_row(subject: Subject, config: Config) -> Row:
    """A step that moves nothing leaves nothing behind: taken twice, it has the same metrics."""
    with policy_on_one_rank(config) as (policy, _):
        first, second = (policy.update(subject.batch.sequences) for _ in range(2))
    gaps = _metric_gaps(second, first)
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
        ((s.advantage if s.token_advantages is None else s.token_advantages) * (new - old))[s.loss_mask]
        for s, old, new in zip(sequences, initial, updated, strict=True)
    ]
    # a sum over tokens, and one over sequences: --loss-aggregation decides which of them an update raises
    rise = max(float(sum(p.sum() for p in products)), float(sum(p.mean() for p in products)))
    # of made-up responses (`Subject.batch`), where it comes from comparing rewards and is one number
    plain = [s for s in sequences if s.kind == "response" and s.token_advantages is None]
    right, wrong = ([s.advantage for s in plain if s.index % 2 == odd] for odd in range(2))
    right_mean, wrong_mean = (sum(advantages) / max(1, len(advantages)) for advantages in (right, wrong))
    faults = broken({
        f"advantage times rise of the log-prob is {rise:.2g}": not rise > 0,
        f"right responses have the advantage {right_mean:.3g}, and wrong ones {wrong_mean:.3g}":
            right_mean < wrong_mean,
    })  # fmt: skip
    reason = f"an update with {len(sequences)} sequences raises those whose advantage is positive"
    return counted_faults("split: direction", faults, reason)


def _kl_row(subject: Subject) -> Row:
    """The reference policy is the initial one, and stays it: a first step has a KL of 0, and a second has
    none of 0."""
    with policy_on_one_rank(with_lr(subject.small, SMALL_LR)) as (policy, _):
        first, second = (policy.update(subject.batch.credited)["kl"] for _ in range(2))
    faults = broken({
        f"a first step has {first:.2g}": not abs(first) < NO_KL,
        f"a second step has {second:.2g}": not abs(second) > NO_KL,
    })  # fmt: skip
    reason = f"KL to the initial policy: {first:.1g} and, after a step, {second:.1g} nats"
    return counted_faults("split: KL", faults, reason)


def check_reference(subject: Subject) -> Iterator[Row]:
    """Compare log-probs of every response token, then the gradient of the whole batch. Left out is what the
    reference does not have: adapters, importance corrections, a router's own loss."""
    small, sequences = subject.small, subject.batch.sequences
    config = replace(
        small,
        loss=replace(small.loss, use_tis=False, icepop=None, sequence_rejection=None,
                     use_routing_replay=False, kl_coef=0.0),
        model=replace(small.model, lora_rank=None, lora_alpha=None, lora_targets=("all",),
                      moe_aux_loss_coeff=0.0),
    )  # fmt: skip
    model = loaded(config.model.hf_dir, torch.float64)
    exact = logprobs_of(model, sequences)
    rounded = logprobs_of(loaded(config.model.hf_dir, torch.float32), sequences)
    with policy_on_one_rank(config) as (policy, _):
        gaps = np.concatenate(differences(policy.logprobs(sequences), exact, sequences))
    spread = float(np.concatenate(differences(rounded, exact, sequences)).max())
    yield measured(
        "reference: log-probs", float(gaps.max()), max(FLOOR, SPREADS * spread),
        f"{SPREADS} x the spread of transformers' own float32, {spread:.1e}, at least {FLOOR:.0e}",
        f"largest difference over {len(gaps)} tokens",
        "the model's conversion, rotary positions, --rollout-temperature",
    )  # fmt: skip
    if small.model.lora_rank is not None:
        raise NotCheckedError("the gradient of adapters has no reference here")
    yield _gradient_row(subject, from_engine(config), model)


def loaded(hf_dir: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a checkpoint.

    Raises:
        NotCheckedError: transformers cannot compute it.
    """
    try:
        return transformers_model(hf_dir, dtype)
    except (ValueError, ImportError) as error:
        raise NotCheckedError(f"transformers cannot load the model: {error}") from error


def _logits(model: Any, sequence: TrainSequence) -> tuple[Tensor, Tensor]:
    """Return (logits of all tokens but the last [N, V], the tokens that follow [N])."""
    ids = torch.tensor([*sequence.prompt_token_ids, *sequence.response_token_ids])
    return model(ids[None]).logits[0, :-1], ids[1:]


@torch.no_grad()
def logprobs_of(model: Any, sequences: Sequence[TrainSequence]) -> list[Array]:
    """Return the log-probs of response tokens, at the temperatures of the samples, that transformers
    computes."""
    logprobs = []
    for s in sequences:
        logits, targets = _logits(model, s)
        rows = (logits / s.temperature).double().log_softmax(-1).gather(1, targets[:, None])
        logprobs.append(rows[len(s.prompt_token_ids) - 1 :, 0].numpy())
    return logprobs


def differences(first: LogProbs, second: LogProbs, sequences: Sequence[TrainSequence]) -> list[Array]:
    """Return |first - second| of each token that the policy wrote, by sequence."""
    triples = zip(first, second, sequences, strict=True)
    return [np.abs(np.subtract(a, b, dtype=float))[s.loss_mask] for a, b, s in triples]


def mean_difference(first: LogProbs, second: LogProbs, sequences: Sequence[TrainSequence]) -> float:
    """Return the mean |first - second| over all tokens that the policy wrote."""
    return float(np.concatenate(differences(first, second, sequences)).mean())


def _gradient_row(subject: Subject, config: Config, model: Any) -> Row:
    update = update_on_one_rank(config, subject.batch.sequences)
    backend = choose_backend("torch", torch.device("cpu"), torch.float32)
    mean_length = weighted_mean_length(subject.batch.sequences)
    objective = run_objective(config, aggregation(config, mean_length), backend)
    for sequence in subject.batch.sequences:
        if sequence.has_advantage and sequence.loss_mask.any():
            logits, targets = _logits(model, sequence)
            policy_loss(logits, _rows(sequence, targets), objective)[0].backward()
    prefix = subject.foundation.shape.hf_prefix
    gradients = {
        name.replace("model.", prefix, 1): torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    expected = {
        name: step_of(gradient).float()
        for name, gradient in tensor_per_expert(gradients)
        if name in update.change
    }
    change = {name: update.change[name] for name in expected}
    gap, furthest, count = largest_difference(change, expected, update.rounding)
    return measured(
        "reference: gradient", gap, 5 * bound_of(subject), SCALE,
        f"{count} tensors against autograd of the loss in plain torch on transformers; furthest: {furthest}",
        "the loss's mask, shift by one, temperature and normaliser; the trainer's packing",
    )  # fmt: skip


def _rows(s: TrainSequence, targets: Tensor) -> LossRows:
    """Return one sequence as rows of the loss: row t predicts token t + 1."""

    def of_response(values: Any, dtype: torch.dtype = torch.float64) -> Any:
        if values is None:
            return None
        row = torch.zeros(len(targets), dtype=dtype)
        row[len(s.prompt_token_ids) - 1 :] = torch.as_tensor(np.asarray(values), dtype=dtype)
        return row

    by_sequence = torch.tensor([s.advantage], dtype=torch.float64)
    return LossRows(
        targets_N=targets,
        response_mask_N=of_response(s.loss_mask, torch.float32),
        cu_seqlens=torch.tensor([0, len(targets)], dtype=torch.int32),
        advantages=by_sequence if s.token_advantages is None else of_response(s.token_advantages),
        old_logprobs_N=of_response(s.rollout_logprobs),
        rollout_logprobs_N=of_response(s.rollout_logprobs),
        token_weights_N=of_response(s.token_weights),
        sequence_weights_S=torch.tensor([s.weight], dtype=torch.float64),
        off_policy_S=torch.tensor([s.off_policy]) if s.off_policy else None,
        temperature=torch.tensor([s.temperature], dtype=torch.float64),
    )
