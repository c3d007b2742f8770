"""The trainer's log-probs and gradient beside those of transformers in float64."""

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
from megatron_ibpo.loss import LossRows, choose_backend, policy_loss
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy.logits_check import tensor_per_expert, transformers_model
from megatron_ibpo.policy.loss_objective import aggregation, run_objective
from megatron_ibpo.policy.planning import weighted_mean_length
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.one_rank import (
    largest_difference,
    policy_on_one_rank,
    step_of,
    update_on_one_rank,
    with_lr,
)
from megatron_ibpo.verify.rows import NotCheckedError, Row, measured
from megatron_ibpo.verify.split import bound_of, from_engine

Array = npt.NDArray[np.float64]

FLOOR, SPREADS = 2e-5, 20
"""Least bound of a log-prob, and how many times the spread of float32 against float64 is right."""


def check_reference(subject: Subject) -> Iterator[Row]:
    """Compare log-probs of every response token, then the gradient of the whole batch."""
    config, sequences = plain(subject.small), subject.sequences
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
    if subject.small.model.lora_rank is not None:
        raise NotCheckedError("the gradient of adapters has no reference here")
    yield _gradient_row(subject, config, model)


def plain(config: Config) -> Config:
    """Return the settings without what the reference does not have: adapters, importance corrections, a
    router's own loss."""
    loss = replace(
        config.loss, use_tis=False, icepop=None, sequence_rejection=None, use_routing_replay=False,
        kl_coef=0.0,
    )  # fmt: skip
    model = replace(
        config.model, lora_rank=None, lora_alpha=None, lora_targets=("all",), moe_aux_loss_coeff=0.0
    )  # fmt: skip
    return replace(config, loss=loss, model=model)


def loaded(hf_dir: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a checkpoint.

    Raises:
        NotCheckedError: transformers cannot compute it.
    """
    try:
        return transformers_model(hf_dir, dtype)
    except (ValueError, ImportError) as error:
        raise NotCheckedError(f"transformers cannot load the model: {error}") from error


@torch.no_grad()
def logprobs_of(model: Any, sequences: Sequence[TrainSequence]) -> list[Array]:
    """Return the log-probs of response tokens that transformers computes."""
    return [_logprobs(model, s).numpy() for s in sequences]


def differences(
    first: Sequence[Array | Floats], second: Sequence[Array | Floats], sequences: Sequence[TrainSequence]
) -> list[Array]:
    """Return |first - second| of each token that the policy wrote, by sequence."""
    return [
        np.abs(np.subtract(a, b, dtype=float))[s.loss_mask]
        for a, b, s in zip(first, second, sequences, strict=True)
    ]


def mean_difference(
    first: Sequence[Array | Floats], second: Sequence[Array | Floats], sequences: Sequence[TrainSequence]
) -> float:
    """Return the mean |first - second| over all tokens that the policy wrote."""
    return float(np.concatenate(differences(first, second, sequences)).mean())


def _logits(model: Any, sequence: TrainSequence) -> tuple[Tensor, Tensor]:
    """Return (logits of all tokens but the last [N, V], the tokens that follow [N])."""
    ids = torch.tensor([*sequence.prompt_token_ids, *sequence.response_token_ids])
    return model(ids[None]).logits[0, :-1], ids[1:]


def _logprobs(model: Any, sequence: TrainSequence) -> Tensor:
    """Return the log-probs of the response's tokens at the temperature of the sample, [R]."""
    logits, targets = _logits(model, sequence)
    scaled = (logits / sequence.temperature).double()
    first = len(sequence.prompt_token_ids) - 1
    return scaled.log_softmax(-1).gather(1, targets[:, None])[first:, 0]


def _gradient_row(subject: Subject, config: Config, model: Any) -> Row:
    config, sequences = from_engine(with_lr(config)), subject.sequences
    update = update_on_one_rank(config, sequences)
    _backward(config, model, sequences)
    prefix = read_hf_config(config.model.hf_dir).hf_prefix
    gradients = {
        name.replace("model.", prefix, 1): torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    expected = {
        name: step_of(gradient).float()
        for name, gradient in tensor_per_expert(gradients)
        if name in update.change
    }
    compared = {name: update.change[name] for name in expected}
    gap, furthest, count = largest_difference(compared, expected, update.rounding)
    return measured(
        "reference: gradient", gap, 5 * bound_of(subject), "float32, relative to the largest of a tensor",
        f"{count} tensors against autograd of the loss in plain torch on transformers; furthest: {furthest}",
        "the loss's mask, shift by one, temperature and normaliser; the trainer's packing",
    )  # fmt: skip


def _backward(config: Config, model: Any, sequences: Sequence[TrainSequence]) -> None:
    """Fill the model's gradients with those of the loss's definition, sequence by sequence."""
    backend = choose_backend("torch", torch.device("cpu"), torch.float32)
    objective = run_objective(config, aggregation(config, weighted_mean_length(sequences)), backend)
    for sequence in sequences:
        if sequence.has_advantage and sequence.loss_mask.any():
            logits, targets = _logits(model, sequence)
            loss, _ = policy_loss(logits, _rows(sequence, targets), objective)
            loss.backward()


def _rows(s: TrainSequence, targets: Tensor) -> LossRows:
    """Return one sequence as rows of the loss: row t predicts token t + 1."""
    start, size = len(s.prompt_token_ids) - 1, len(targets)

    def of_response(values: Any, dtype: torch.dtype) -> Tensor:
        row = torch.zeros(size, dtype=dtype)
        row[start:] = torch.as_tensor(np.asarray(values), dtype=dtype)
        return row

    advantages = torch.tensor([s.advantage], dtype=torch.float64)
    if s.token_advantages is not None:
        advantages = of_response(s.token_advantages, torch.float64)
    weights = None if s.token_weights is None else of_response(s.token_weights, torch.float64)
    engine = None if s.rollout_logprobs is None else of_response(s.rollout_logprobs, torch.float64)
    return LossRows(
        targets_N=targets,
        response_mask_N=of_response(s.loss_mask, torch.float32),
        cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
        advantages=advantages,
        old_logprobs_N=engine,
        rollout_logprobs_N=engine,
        token_weights_N=weights,
        sequence_weights_S=torch.tensor([s.weight], dtype=torch.float64),
        off_policy_S=torch.tensor([s.off_policy]) if s.off_policy else None,
        temperature=torch.tensor([s.temperature], dtype=torch.float64),
    )
