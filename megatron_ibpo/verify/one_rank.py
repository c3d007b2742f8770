"""A trainer of one rank in this process, and the change of weights that one update makes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ibpo.basics.records import TrainSequence
from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.run.in_one_process import OwnRank, own_trainer

READ_OFF = 1000.0
"""Learning rate with which a step's change of the weights shows its gradient."""
ROUNDING = 2.0**-21
"""Rounding of a float32 weight of size up to 4, twice."""


@dataclass(frozen=True)
class Update:
    """One update of all its sequences, and what it did."""

    change: dict[str, Tensor]
    """Change of each weight over the learning rate, by name in a checkpoint: about the gradient."""
    metrics: dict[str, float]
    rounding: float
    """Rounding of `change`."""


@contextmanager
def policy_on_one_rank(config: Config) -> Iterator[tuple[Policy, Any]]:
    """Provide (the policy on one rank in this process, the rank)."""
    parallel = replace(ParallelConfig(), use_distributed_optimizer=config.parallel.use_distributed_optimizer)
    config = replace(config, parallel=parallel, cluster=replace(config.cluster, num_trainers=1))
    shape = read_hf_config(config.model.hf_dir)
    with own_trainer(config) as rank:
        yield Policy(OwnRank(rank), config, 1, partial(forward_flops, shape)), rank


def update_on_one_rank(config: Config, sequences: Sequence[TrainSequence]) -> Update:
    """Take one update of the sequences in this process, from the initial weights."""
    with policy_on_one_rank(config) as (policy, rank):
        initial = copies(rank)
        metrics = policy.update(sequences)
        lr = metrics["learning_rate"]
        return Update(changes(initial, copies(rank), lr), metrics, ROUNDING / lr)


def with_lr(config: Config, lr: float = READ_OFF) -> Config:
    """Return the settings of one optimizer step per rollout at a constant learning rate. With READ_OFF the
    step's change of the weights is its gradient, where |g| << 1."""
    optimizer = replace(config.optimizer, lr=lr, lr_decay_style="constant")
    loss = replace(config.loss, num_steps_per_rollout=1, num_epochs_per_rollout=1)
    return replace(config, optimizer=optimizer, loss=loss)


def changes(initial: Mapping[str, Tensor], updated: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
    """Return how far each weight moved against its gradient, over the learning rate."""
    return {name: (initial[name] - updated[name]) / lr for name in initial}


def step_of(gradient: Tensor) -> Tensor:
    """Return the first step of Adam along a gradient, over the learning rate (`small_run`)."""
    return gradient / (gradient.abs() + 1)


def gradient_of(change: Tensor) -> Tensor:
    """Return the gradient that leads to this change of weights: the inverse of `step_of`."""
    return change / (1 - change.abs())


def copies(rank: Any) -> dict[str, Tensor]:
    """Return copies of the weights in float32, by name in a checkpoint."""
    return {name: tensor.detach().float().cpu().clone() for name, tensor in rank.export}


def weights_in(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in float32."""
    return {
        name: tensor.to(torch.float32)
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def largest_difference(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: float
) -> tuple[float, str, int]:
    """Return the largest difference of a tensor relative to its own largest value, that tensor's name, and
    the number of tensors compared. Tensors within a hundred roundings of 0 in both are not compared.

    Raises:
        ValueError: the two do not hold the same tensors.
    """
    if tensors.keys() != expected.keys():
        names = sorted(tensors.keys() ^ expected.keys())
        raise ValueError(f"{len(names)} tensors are on one side only: {', '.join(names[:3])}")
    largest, furthest, count = 0.0, "", 0
    for name, reference in expected.items():
        scale = max(reference.abs().max().item(), tensors[name].abs().max().item())
        if scale <= 100 * rounding:
            continue
        count += 1
        gap = max(0.0, (tensors[name] - reference).abs().max().item() - rounding) / scale
        if not gap <= largest:  # NaN too
            largest, furthest = gap, name
    return largest, furthest, count
