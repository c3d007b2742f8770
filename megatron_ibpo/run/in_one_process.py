"""Trainer and engine in the driver's own process, for studies of tiny policies (--rollout-backend lean).

Loop, trainer, credit and rewards are the same as in every run; there is no Ray, and `engines.lean` samples
in place of vLLM. When this process dies, --load resumes from the last checkpoint and the journal as always.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.cluster.placement import Node, Placement, plan_placement
from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.engines import EngineLostError
from megatron_ibpo.engines.lean import LeanEngine, check_shape, checkpoint_weights
from megatron_ibpo.models import ModelShape, forward_flops
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.policy.process_start import trainer_rank
from megatron_ibpo.run.inputs import Inputs, Judges
from megatron_ibpo.run.resolve import Foundation, ResolvedConfig, check_model_layout
from megatron_ibpo.run.state import Launched, Processes

ABOUT = (
    "one process trains and samples (--rollout-backend lean): its steps and rewards can be compared with "
    "those of other runs, its seconds cannot"
)


class InOneProcess:
    """The back end of the lean engine."""

    def check(self, config: Config, shape: ModelShape) -> None:
        """Refuse a model or a layout that does not work in one process."""
        check_shape(shape)
        check_model_layout(shape, config, 1)

    def connect(self, config: Config) -> AbstractContextManager[Callable[[], None]]:
        """Connect to nothing: there is no cluster."""
        return nullcontext(lambda: None)

    def place(self, config: Config, *, samples: bool = True) -> Placement:
        """Return the place of the trainer: the GPU, if there is one. The engine is on the CPU."""
        on_gpu = torch.cuda.is_available()
        node = Node("here", "here", cpus=1, gpus=int(on_gpu))
        return plan_placement([node], num_trainers=1, engines=None, on_gpu=on_gpu)

    def launch(
        self, resolved: ResolvedConfig, inputs: Inputs, judges: Judges, stack: ExitStack
    ) -> Launched[Processes]:
        """Start nothing; the trainer is built in this process, and the engine with its weights."""

        def build(checkpoint: Path | None) -> Processes:
            rank = stack.enter_context(own_trainer(resolved.config, checkpoint))
            return Processes(
                trainers=OwnRank(rank),
                engines=LeanEngines(rank, resolved.foundation),
                verifiers=judges.pool,
                environments=judges.environments,
                deaths=partial(_deaths, judges),
                placement_note=ABOUT,
            )

        return Launched({}, build)

    def launch_trainers(self, resolved: ResolvedConfig, stack: ExitStack) -> Launched[tuple["OwnRank", str]]:
        """Start nothing; the trainer is built in this process."""

        def build(checkpoint: Path | None) -> tuple[OwnRank, str]:
            rank = stack.enter_context(own_trainer(resolved.config, checkpoint))
            return OwnRank(rank), "one process trains (--rollout-backend lean)"

        return Launched({}, build)


class OwnRank:
    """The only trainer rank, an object of this process (`policy.group.RankCalls`)."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the result of `method`, called with the one rank's arguments."""
        (rank_arguments,) = arguments
        return [getattr(self._rank, method)(*rank_arguments)]

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Return the result of `method`."""
        return self.call_each(method, [arguments])

    def share(self, value: Any) -> Any:
        """Return the value itself, since nothing is transferred."""
        return value

    def restart(self, *arguments: Any) -> None:
        """Never called: a trainer that dies here takes the driver with it."""
        raise NotImplementedError


class LeanEngines:
    """The one engine, in this process, for the loop and the sampler (`run.state.Engines`)."""

    count = alive = 1

    def __init__(self, rank: Any, foundation: Foundation) -> None:
        """Build the engine, without weights yet.

        Args:
            rank: the trainer; weights are copied from its memory.

        Raises:
            ValueError: a model that the lean back end does not support.
        """
        self._rank, self._shape = rank, foundation.shape
        self._engine = LeanEngine(
            foundation.shape, foundation.eos_token_ids, max_context=foundation.max_context
        )
        self.version = -1  # no weights

    prefix_caching = False
    reproducible = True

    def clients(self) -> list[Any]:
        """Return the engines for the sampler."""
        return [self._engine]

    async def revive(self, index: int) -> Any:
        """Raise: this process cannot be replaced."""
        raise EngineLostError("the engine is this process")

    def sleep(self) -> None:
        """No-op, as `wake`, `admit` and `meet_trainers`: the engine holds no device, is never restarted, and
        is an object of the trainer's process."""

    wake = admit = meet_trainers = sleep

    def update_weights(self, version: int) -> dict[str, float]:
        """Copy the trainer's weights, those of policy `version`; return the same metrics as other engines."""
        began = time.monotonic()
        copied = self._engine.load(iter(self._rank.export), version)
        self.version = version
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(copied),
            "weight_update_bytes_ratio": 1.0,
        }

    def idle(self, index: int) -> Any:
        """Return the engine."""
        return self._engine

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[Any]:
        """Provide the engine with the weights of `hf_dir` as version 0; load the trainer's on the way out."""
        self._engine.load(checkpoint_weights(self._shape, hf_dir), 0)
        yield self._engine
        self.update_weights(self.version)


@contextmanager
def own_trainer(config: Config, checkpoint: Path | None = None) -> Iterator[Any]:
    """Build the trainer rank of a world of one; destroy Megatron's groups on the way out."""
    rank = trainer_rank(config, checkpoint)
    from megatron_ibpo.policy import parallel  # after trainer_rank has put its stand-ins before Megatron

    try:
        yield rank
    finally:
        parallel.destroy()
        rank.world.close()


@contextmanager
def own_policy(config: Config) -> Iterator[tuple[Policy, Any]]:
    """Provide (the policy on one rank in this process, whatever the layout and cluster; the rank)."""
    parallel = replace(ParallelConfig(), use_distributed_optimizer=config.parallel.use_distributed_optimizer)
    config = replace(config, parallel=parallel, cluster=replace(config.cluster, num_trainers=1))
    with own_trainer(config) as rank:
        yield Policy(OwnRank(rank), config, 1, partial(forward_flops, rank.shape)), rank


def _deaths(judges: Judges) -> dict[str, int]:
    """Return the number of dead processes, by metric."""
    counts = {"verifier_deaths": judges.pool.deaths}
    counts |= {"engine_deaths": 0, "engine_restarts": 0}
    if judges.environments is not None:
        counts["environment_deaths"] = judges.environments.deaths
    return counts
