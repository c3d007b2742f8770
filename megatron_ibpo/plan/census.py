"""Parameters of every rank, counted on the real model: built on the meta device, without weights or GPUs."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import ModelShape
from megatron_ibpo.world import World


@dataclass(frozen=True)
class RankPart:
    """One rank's place in the layout, and its parameters (elements)."""

    rank: int
    tensor: int
    """Index in the tensor-parallel group; the others likewise."""
    pipeline: int
    data: int
    expert: int
    expert_data: int
    dense: int
    """Parameters outside the experts, of which there are DP copies."""
    experts: int
    """Parameters of experts, of which there are expert-DP copies."""
    layers: int
    largest: int
    """Elements of the largest single parameter."""

    @property
    def parameters(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Census:
    """The whole model and its parts."""

    total: int
    """Parameters of the model, each counted once."""
    largest: int
    """Elements of the largest tensor of the whole model."""
    ranks: list[RankPart]
    data_parallel: int
    expert_data_parallel: int


def take_census(shape: ModelShape, config: Config, world_size: int) -> Census:
    """Build each rank's part of the model on the meta device, as that rank would, and count.

    The layout must have passed `check_layout`. Needs no launcher and no GPU; leaves no process group behind.

    Raises:
        RuntimeError: torch.distributed is in use in this process.
    """
    if dist.is_initialized():
        raise RuntimeError("a census needs a process without process groups")
    alone = replace(config, parallel=ParallelConfig(sequence_parallel=False))
    with _quiet():
        whole = _count(shape, alone, rank=0, world_size=1)
        ranks = [_count(shape, config, rank, world_size) for rank in range(world_size)]
    return Census(
        total=whole.parameters,
        largest=whole.largest,
        ranks=ranks,
        data_parallel=1 + max(part.data for part in ranks),
        expert_data_parallel=1 + max(part.expert_data for part in ranks),
    )


def _count(shape: ModelShape, config: Config, rank: int, world_size: int) -> RankPart:
    from megatron.core import parallel_state

    from megatron_ibpo.policy.model import build_model

    with as_rank(rank, world_size, config):
        (chunk,) = build_model(shape, config, device="meta")
        dense = experts = largest = 0
        for name, parameter in chunk.named_parameters():
            if parameter.device.type != "meta":
                raise AssertionError(f"{name} was really allocated")
            largest = max(largest, parameter.numel())
            if getattr(parameter, "allreduce", True):
                dense += parameter.numel()
            else:
                experts += parameter.numel()
        return RankPart(
            rank=rank,
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            pipeline=parallel_state.get_pipeline_model_parallel_rank(),
            data=parallel_state.get_data_parallel_rank(),
            expert=parallel_state.get_expert_model_parallel_rank(),
            expert_data=parallel_state.get_expert_data_parallel_rank(),
            dense=dense,
            experts=experts,
            layers=len(chunk.decoder.layers),
            largest=largest,
        )


@contextmanager
def as_rank(rank: int, world_size: int, config: Config) -> Iterator[None]:
    """This process as `rank` of a world in which nobody else exists and no collective communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ibpo.policy import parallel

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        world = World(rank, world_size, torch.device("cpu"), control=None)
        parallel.initialize(config.parallel, world, config.run.seed)
        try:
            yield
        finally:
            parallel.destroy()
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Megatron's remarks on every construction."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
