"""The trainer's loss and gradient in this process: they do not depend on how a batch is cut (`check_split`;
`checks` cuts it over ranks), and are those of transformers in float64 (`check_reference`)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    Batch,
    Subject,
    Update,
    from_engine,
    policy_on_one_rank,
    tensor_gaps,
    update_on_one_rank,
    with_lr,
)
from megatron_ibpo.verify.rows import NotCheckedError, Row, counted_faults, largest, measured, not_checked

BOUND, RECURRENT_BOUND = 2e-4, 1e-3
"""Largest relative difference of a gradient in float32; delta nets sum long products."""
RESOLUTION = 1e-7
"""Share of the largest gradient that float32 loses in another one, such as a delta net's decay, whose terms
cancel."""
FLOOR, SPREADS = 2e-5, 20
"""Least bound of a log-prob, and how many times the spread of float32 against float64 is right."""
SMALL_LR, NO_LR, NO_KL = 1e-2, 1e-12, 1e-6
"""Learning rates of a step after which log-probs have changed in proportion to it, and of one that moves
nothing; and nats that float32 makes of a KL of 0."""
METRICS = ("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "kl")
PLAIN_LOSS: dict[str, Any] = {
    "use_tis": False, "icepop": None, "sequence_rejection": None, "use_routing_replay": False, "kl_coef": 0.0,
}  # fmt: skip
PLAIN_MODEL: dict[str, Any] = {
    "lora_rank": None, "lora_alpha": None, "lora_targets": ("all",), "moe_aux_loss_coeff": 0.0,
}  # fmt: skip
"""Settings without what the reference does not have."""

Array = npt.NDArray[np.float64]
LogProbs = Sequence[Array | Floats]


def check_split(subject: Subject) -> Iterator[Row]:
    """Compare one micro-batch of everything with other cuts, other orders and other neighbours."""
    sequences, bound = subject.batch.sequences, bound_of(subject)
    yield _credit_row(subject.batch)
    third = sum(s.num_tokens for s in sequences) // 3
    longest = max(s.num_tokens for s in sequences)
    for name, update in {
        "a micro-batch for each sequence": partial(subject.update, sequences, 1),
        f"micro-batches of {third} tokens": partial(subject.update, sequences, max(third, longest)),
        "the reverse order": partial(subject.update, sequences[::-1]),
    }.items():
        yield compared(f"split: {name}", update(), subject.uncut, bound)
    if subject.small.model.lora_rank is None:
        yield _clipping_row(subject)
    else:
        yield not_checked("split: clipping", "adapters' gradient is not that of the weights")
    with policy_on_one_rank(with_lr(from_engine(subject.small), NO_LR)) as (policy, _):
        first, second = (policy.update(sequences) for _ in range(2))
    yield furthest_row("split: the same step twice", _metric_gaps(second, first), bound, "metrics")
    yield from _small_step_rows(subject)


def compared(check: str, update: Update, expected: Update, bound: float) -> Row:
    """Return the row of two updates that should be the same."""
    if not expected.metrics.get("grad_norm"):
        raise NotCheckedError("the batch has no gradient")
    rounding = max(update.rounding, expected.rounding)
    gaps = tensor_gaps(update.change, expected.change, rounding)
    gaps |= _metric_gaps(update.metrics, expected.metrics)
    return furthest_row(check, gaps, bound, "gradients and metrics")


def furthest_row(check: str, gaps: Mapping[str, float], bound: float, what: str) -> Row:
    """Return the row of the largest of relative differences, which are named by what differs."""
    gap, name = largest(gaps)
    reason = f"relative difference of {len(gaps)} {what}; furthest: {name}"
    return measured(check, gap, bound, "float32, relative to the largest of a tensor", reason)


def _metric_gaps(metrics: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    """Return the relative difference of each metric."""
    return {
        f"metric {name}": abs(metrics[name] - expected[name]) / max(abs(expected[name]), 1e-2)
        for name in METRICS
        if name in expected
    }


def step_of(gradient: Tensor) -> Tensor:
    """Return the first step of Adam along a gradient, over the learning rate (`small_run`)."""
    return gradient / (gradient.abs() + 1)


def bound_of(subject: Subject) -> float:
    """Return the largest difference that float32 explains."""
    return RECURRENT_BOUND if subject.foundation.shape.is_recurrent else BOUND


def _credit_row(batch: Batch) -> Row:
    """Advantages and weights do not depend on the order of the groups, and a failed verifier gives none."""

    def key(s: TrainSequence) -> tuple[int, str, int]:
        return s.prompt_index, s.kind, s.index

    def credit(s: TrainSequence) -> Array:
        values = (s.advantage, s.weight, s.token_weights, s.token_advantages)
        return np.hstack([np.inf if value is None else value for value in values])

    reordered = {key(s): credit(s) for s in batch.credited_reversed}
    failed = {(g.prompt.index, r.index) for g in batch.groups for r in g.responses if r.reward is None}
    faults = []
    for s in batch.credited:
        ours, theirs = credit(s), reordered.get(key(s))
        is_same = theirs is not None and theirs.shape == ours.shape and np.allclose(ours, theirs, 1e-6, 1e-9)
        is_failed = s.kind == "response" and (s.prompt_index, s.index) in failed
        faults += broken({
            f"{key(s)} has the advantage {s.advantage:.6g}, or none or another": not is_same,
            f"{key(s)} has the advantage {s.advantage:.3g}, and no reward": s.has_advantage and is_failed,
        })  # fmt: skip
    reason = f"{len(batch.credited)} sequences, of groups in either order"
    return counted_faults("split: credit", faults, reason)


def _clipping_row(subject: Subject) -> Row:
    """The norm is that of the gradient that a step's change shows, and half of it as --clip-grad halves the
    gradient."""
    norm = subject.uncut.metrics["grad_norm"]
    gradient = {
        name: change / (1 - change.abs())  # the inverse of `step_of`
        for name, change in subject.uncut.change.items()
        if not name.endswith("e_score_correction_bias")  # it has a rule of its own
    }
    config = from_engine(subject.small)
    clipped = replace(config, optimizer=replace(config.optimizer, clip_grad=norm / 2))
    change = update_on_one_rank(clipped, subject.batch.sequences).change
    expected = {name: step_of(tensor / 2) for name, tensor in gradient.items()}
    gaps = tensor_gaps({n: change[n] for n in expected}, expected, subject.uncut.rounding)
    exact_norm = math.sqrt(sum(tensor.double().square().sum().item() for tensor in gradient.values()))
    gaps[f"the norm, {norm:.4g} in place of {exact_norm:.4g}"] = abs(exact_norm - norm) / norm
    what = f"gradients with --clip-grad {norm / 2:.3g}"
    return furthest_row("split: clipping", gaps, 5 * bound_of(subject), what)


def _small_step_rows(subject: Subject) -> Iterator[Row]:
    """Check that what earns more has the larger advantage, and that an update makes it likelier; and that the
    reference policy is the initial one and stays it: a first step has a KL of 0, and a second has not."""
    sequences = [s for s in subject.batch.credited if s.has_advantage and s.loss_mask.any()]
    with policy_on_one_rank(with_lr(subject.small, SMALL_LR)) as (policy, _):
        initial = policy.logprobs(sequences)
        batch = [replace(s, rollout_logprobs=old) for s, old in zip(sequences, initial, strict=True)]
        first = policy.update(batch)
        updated = policy.logprobs(sequences)
        second = policy.update(batch)
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
    yield counted_faults("split: direction", faults, reason)
    if subject.small.loss.kl_coef:
        faults = broken({
            f"a first step has {first['kl']:.2g}": not abs(first["kl"]) < NO_KL,
            f"a second step has {second['kl']:.2g}": not abs(second["kl"]) > NO_KL,
        })  # fmt: skip
        yield counted_faults(
            "split: KL", faults, "nats to the initial policy, in a first step and in a second"
        )


def check_reference(subject: Subject) -> Iterator[Row]:
    """Compare log-probs of every response token, then the gradient of the whole batch. Left out is what the
    reference does not have: adapters, importance corrections, a router's own loss."""
    small, sequences = subject.small, subject.batch.sequences
    plain = replace(small.model, **PLAIN_MODEL)
    config = replace(small, loss=replace(small.loss, **PLAIN_LOSS), model=plain)
    model = loaded(plain.hf_dir, torch.float64)
    exact = logprobs_of(model, sequences)
    with policy_on_one_rank(config) as (policy, _):
        gaps = np.concatenate(token_gaps(policy.logprobs(sequences), exact, sequences))
    spread = float(np.concatenate(spreads(plain.hf_dir, "float32", exact, sequences)).max())
    yield measured(
        "reference: log-probs", float(gaps.max()), max(FLOOR, SPREADS * spread),
        f"{SPREADS} x the spread of transformers' own float32, {spread:.1e}, at least {FLOOR:.0e}",
        f"largest difference over {len(gaps)} tokens",
    )  # fmt: skip
    if small.model.lora_rank is not None:
        raise NotCheckedError("the gradient of adapters has no reference here")
    yield _gradient_row(subject, from_engine(config), model)


def loaded(hf_dir: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a checkpoint. Raises NotCheckedError if transformers has none."""
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
    """Return transformers' log-probs of response tokens, at the temperatures of the samples."""
    logprobs = []
    for s in sequences:
        logits, targets = _logits(model, s)
        rows = (logits / s.temperature).double().log_softmax(-1).gather(1, targets[:, None])
        logprobs.append(rows[len(s.prompt_token_ids) - 1 :, 0].numpy())
    return logprobs


def token_gaps(first: LogProbs, second: LogProbs, sequences: Sequence[TrainSequence]) -> list[Array]:
    """Return |first - second| of each token that the policy wrote, by sequence."""
    triples = zip(first, second, sequences, strict=True)
    return [np.abs(np.subtract(a, b, dtype=float))[s.loss_mask] for a, b, s in triples]


def spreads(hf_dir: Path, precision: str, exact: LogProbs, sequences: Sequence[TrainSequence]) -> list[Array]:
    """Return the differences of transformers' log-probs in a precision from exact ones, as `token_gaps`."""
    rounded = logprobs_of(loaded(hf_dir, getattr(torch, precision)), sequences)
    return token_gaps(rounded, exact, sequences)


def mean_of(gaps: Sequence[Array]) -> float:
    """Return the mean over all tokens of all sequences."""
    return float(np.concatenate(gaps).mean())


def _gradient_row(subject: Subject, config: Config, model: Any) -> Row:
    """Compare the gradient with autograd of the loss in plain torch on transformers' model."""
    sequences = subject.batch.sequences
    update = update_on_one_rank(config, sequences)
    backend = choose_backend("torch", torch.device("cpu"), torch.float32)
    objective = run_objective(config, aggregation(config, weighted_mean_length(sequences)), backend)
    for sequence in sequences:
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
    largest_step = max(step.abs().max().item() for step in expected.values())
    rounding = max(update.rounding, RESOLUTION * largest_step)
    gaps = tensor_gaps({name: update.change[name] for name in expected}, expected, rounding)
    return furthest_row("reference: gradient", gaps, 5 * bound_of(subject), "tensors from plain autograd")


def _rows(s: TrainSequence, targets: Tensor) -> LossRows:
    """Return one sequence as rows of the loss: row t predicts token t + 1."""

    def of_response(values: Any, dtype: torch.dtype = torch.float64) -> Any:
        if values is None:
            return None
        row = torch.zeros(len(targets), dtype=dtype)
        row[len(s.prompt_token_ids) - 1 :] = torch.as_tensor(np.asarray(values), dtype=dtype)
        return row

    advantage, weight, temperature = torch.tensor(
        [[s.advantage], [s.weight], [s.temperature]], dtype=torch.float64
    )
    return LossRows(
        targets_N=targets,
        response_mask_N=of_response(s.loss_mask, torch.float32),
        cu_seqlens=torch.tensor([0, len(targets)], dtype=torch.int32),
        advantages=advantage if s.token_advantages is None else of_response(s.token_advantages),
        old_logprobs_N=of_response(s.rollout_logprobs),
        rollout_logprobs_N=of_response(s.rollout_logprobs),
        token_weights_N=of_response(s.token_weights),
        sequence_weights_S=weight,
        off_policy_S=torch.tensor([s.off_policy]) if s.off_policy else None,
        temperature=temperature,
    )
