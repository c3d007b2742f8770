"""Parameters of every pipeline stage's ranks, counted on the real model, which is built on the meta
device."""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import Config, ModelConfig, ParallelConfig
from megatron_ibpo.models import ModelShape, least_world, pipeline_layers
from megatron_ibpo.models.backends import LOCAL
from megatron_ibpo.models.cost import weight_count
from megatron_ibpo.models.lora import adapter_entries
from megatron_ibpo.policy.overrides import CHUNKS, read_overrides


@dataclass(frozen=True)
class StagePart:
    """The parameters of each rank of a pipeline stage. They are the same on all its ranks: layouts divide
    evenly."""

    pipeline: int
    """Index of the stage."""
    dense: int
    """Parameters outside the experts; each has DP copies."""
    experts: int
    """Parameters of experts; each has expert-DP copies."""
    frozen_dense: int
    """Parameters of `dense` that are not trained."""
    frozen_experts: int
    """Parameters of `experts` that are not trained."""
    layers: int
    largest: int
    """Elements of the largest single parameter."""

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        return self.parameters - self.frozen_dense - self.frozen_experts


@dataclass(frozen=True)
class Place:
    """One rank's place in the layout: its index in each of its groups, with data and context parallel as
    one."""

    rank: int
    tensor: int
    pipeline: int
    data: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Census:
    """Parameter counts of the whole model and of its parts."""

    total: int
    """Parameters of the model, each counted once, without adapters."""
    trained: int
    """Trained parameters: the model's, or those of its adapters."""
    largest: int
    """Elements of the largest tensor of the whole model."""
    stages: list[StagePart]
    parallel: ParallelConfig
    world_size: int

    @property
    def data_parallel(self) -> int:
        """Number of ranks with the same dense parameters: data parallel times context parallel."""
        return self._stage_size // self.parallel.tensor_model_parallel_size

    @property
    def expert_data_parallel(self) -> int:
        parallel = self.parallel
        return self._stage_size // (
            parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
        )

    @property
    def _stage_size(self) -> int:
        return self.world_size // len(self.stages)

    def ranks(self, stage: int) -> range:
        """Return the ranks of a pipeline stage."""
        return range(stage * self._stage_size, (stage + 1) * self._stage_size)

    def place(self, rank: int) -> Place:
        """Return Megatron's placement of a rank: tensor-parallel first, then expert, data and pipeline
        parallel."""
        stage, inner = divmod(rank, self._stage_size)
        data, tensor = divmod(inner, self.parallel.tensor_model_parallel_size)
        expert_data, expert = divmod(
            inner // self.parallel.expert_tensor_parallel_size, self.parallel.expert_model_parallel_size
        )
        return Place(rank, tensor, stage, data, expert, expert_data)


def take_census(shape: ModelShape, config: Config, world_size: int) -> Census:
    """Build one rank's part of each pipeline stage on the meta device, as that rank would, and count.

    The layout must have passed `check_layout`. Needs no launcher and no GPU, and leaves no process group
    behind. The time does not depend on the world size: parts are built in the smallest world that has the
    layout.

    Raises:
        RuntimeError: torch.distributed is in use in this process.
        ValueError: Megatron refuses a setting of --model-override.
    """
    from megatron_ibpo.policy.model import check_model

    if dist.is_initialized():
        raise RuntimeError("a census needs a process without process groups")
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size
    alone = replace(
        config,
        parallel=ParallelConfig(sequence_parallel=False),
        model=replace(config.model, model_override=()),
    )
    base = replace(alone, model=replace(alone.model, lora_rank=None))
    with _quiet():
        check_model(shape, config)
        # parameters do not depend on how ranks share a sequence or the optimizer's state
        alike = replace(parallel, context_parallel_size=1, use_distributed_optimizer=False)
        config = replace(config, parallel=alike)
        world = least_world(alike)
        whole = _count(shape, base, 0, rank=0, world_size=1)
        adapters = config.model.lora_rank is not None
        trained = _count(shape, alone, 0, rank=0, world_size=1).trained if adapters else whole.trained
        parts = [
            _count(shape, config, stage, rank=stage * world // stages, world_size=world)
            for stage in range(stages)
        ]
    return Census(whole.parameters, trained, whole.largest, parts, parallel, world_size)


def estimate_census(shape: ModelShape, config: Config, world_size: int) -> Census:
    """Estimate the same counts from the shape alone, instantly, for comparing many layouts. Norms, biases and
    short convolutions are left out. All layers of a model are assumed to have the same size, apart from
    experts, and adapters to be whole on every rank."""
    parallel, count, chunks = config.parallel, weight_count(shape), read_overrides(config).chunks
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    expert_ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    expert = shape.hidden_size * shape.expert_hidden_size
    largest = max(count.table, 2 * shape.hidden_size * shape.ffn_hidden_size, 2 * expert)
    adapters = sum(math.prod(entry.shape) for entry in adapter_entries(config.model, shape))
    parts = []
    for stage, ranges in enumerate(pipeline_layers(shape.num_layers, parallel, chunks)):
        layers = sum(map(len, ranges))
        with_experts = sum(shape.has_experts(layer) for own in ranges for layer in own)
        ends = (stage == 0) + (stage == stages - 1)
        tables = min(ends, 1) if shape.tie_word_embeddings else ends
        dense = (count.layers * layers // shape.num_layers + tables * count.table) // tensor
        experts = count.experts * with_experts // max(1, shape.moe_layers) // expert_ranks
        parts.append(
            StagePart(
                pipeline=stage,
                dense=dense + adapters * layers // shape.num_layers,
                experts=experts,
                frozen_dense=dense if adapters else 0,
                frozen_experts=experts if adapters else 0,
                layers=layers,
                largest=largest // tensor,
            )
        )
    return Census(count.total, adapters or count.total, largest, parts, parallel, world_size)


def _count(shape: ModelShape, config: Config, stage: int, *, rank: int, world_size: int) -> StagePart:
    model = config.model
    # no other setting changes a parameter, and other overrides may need libraries that are missing here
    pieces = read_overrides(config).chunks
    built = ModelConfig(
        mtp_num_layers=model.mtp_num_layers,
        lora_rank=model.lora_rank,
        lora_targets=model.lora_targets,
        model_override=(f"{CHUNKS}={pieces}",) if pieces > 1 else (),
    )
    return _build_and_count(shape, _values(built), _values(config.parallel), stage, rank, world_size)


def _values(section: ModelConfig | ParallelConfig) -> tuple[Any, ...]:
    return tuple(getattr(section, field.name) for field in fields(section))


@lru_cache(maxsize=256)
def _build_and_count(
    shape: ModelShape,
    model: tuple[Any, ...],
    parallel: tuple[Any, ...],
    stage: int,
    rank: int,
    world_size: int,
) -> StagePart:
    """Build and count one part. Sections of the configuration are passed as their values, as keys of the
    cache: a large model takes seconds to build, and the plans of one process mostly differ in settings that
    change no parameter."""
    from megatron_ibpo.policy.model import build_model

    config = Config(model=ModelConfig(*model), parallel=ParallelConfig(*parallel))
    with as_rank(rank, world_size, config):
        largest = 0
        counts = {(is_expert, trained): 0 for is_expert in (False, True) for trained in (False, True)}
        chunks = build_model(shape, config, device="meta")
        layers = sum(len(chunk.decoder.layers) for chunk in chunks)
        for part in [*chunks, *_beside(shape, config)]:
            for name, parameter in part.named_parameters():
                if parameter.device.type != "meta":
                    raise AssertionError(f"{name} was really allocated")
                largest = max(largest, parameter.numel())
                is_expert = not getattr(parameter, "allreduce", True)
                counts[is_expert, parameter.requires_grad] += parameter.numel()
        return StagePart(
            pipeline=stage,
            dense=counts[False, False] + counts[False, True],
            experts=counts[True, False] + counts[True, True],
            frozen_dense=counts[False, False],
            frozen_experts=counts[True, False],
            layers=layers,
            largest=largest,
        )


def _beside(shape: ModelShape, config: Config) -> list[Module]:
    """Build the layers that are trained in addition to the policy; there is one stage then
    (`check_layout`)."""
    from megatron_ibpo.policy.mtp_model import build_mtp

    if not config.model.mtp_num_layers:
        return []
    return [build_mtp(shape, config, device="meta", libraries=LOCAL)]


@contextmanager
def as_rank(rank: int, world_size: int, config: Config) -> Iterator[None]:
    """Make this process `rank` of a world without other processes, where no collective communicates."""
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
    """Silence Megatron's warnings and output at every construction."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
