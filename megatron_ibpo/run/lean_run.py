"""A run in one process, for studies of tiny policies (--rollout-backend lean).

The loop, the trainer, credit and rewards are those of every run; there is no Ray, and `engines.lean` samples
in the place of vLLM.

What differs from other runs is who holds trainer and engine. A death of this process is the end of both, and
--load goes on from the last checkpoint and the journal as always.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.config import Config, on_device
from megatron_ibpo.engines import EngineLostError
from megatron_ibpo.engines.lean import LeanEngine, check_shape, checkpoint_weights
from megatron_ibpo.engines.vllm.settings import read_eos_token_ids
from megatron_ibpo.models import ModelShape
from megatron_ibpo.policy.process_start import trainer_rank
from megatron_ibpo.report import Stages
from megatron_ibpo.rewards import Pool
from megatron_ibpo.run.loop import Run
from megatron_ibpo.run.opening import (
    Beginning,
    Given,
    Standing,
    check_model_layout,
    failure_in_summary,
    join,
    open_given,
    read_beginning,
)

ABOUT = (
    "one process trains and samples (--rollout-backend lean): compare its steps and rewards with those of "
    "other runs, not its seconds"
)


@contextmanager
def open_lean_run(config: Config) -> Iterator[Run]:
    """Everything that a run in one process needs; closed again on the way out, whatever happens.

    Raises:
        ValueError, OSError: with what is wrong, where, and what to do.
    """
    stages = Stages()
    with ExitStack() as stack:
        with stages("start"):
            begun = _in_one_process(read_beginning(config))
            given = open_given(begun, stack)
            run = join(begun, given, _started(begun, given, stack), stages, stack)
        run.progress.start_seconds = stages.take()
        with failure_in_summary(run.reporter):
            yield run


def _in_one_process(begun: Beginning) -> Beginning:
    """
    Raises:
        ValueError: a GPU is there, or a model or layout that cannot be had in one process.
    """
    check_shape(begun.shape)
    if torch.cuda.is_available():
        raise ValueError("--rollout-backend lean: is for processors, and there is a GPU; take vllm")
    config = replace(begun.config, cluster=replace(begun.config.cluster, num_trainers=1))
    config = on_device(config, on_gpu=False, has_delta_nets=begun.shape.is_recurrent)
    check_model_layout(begun.shape, config, 1)
    return replace(begun, config=config)


def _started(begun: Beginning, given: Given, stack: ExitStack) -> Standing:
    """The trainer, and the engine with its weights."""
    config = given.config
    rank = stack.enter_context(_trainer(config, begun.checkpoint))
    engines = LeanEngines(rank, begun.shape, config, begun.hf_dir)
    engines.update_weights(begun.step)
    return Standing(
        config=config,
        trainers=OwnRank(rank),
        world_size=1,
        engines=engines,
        verifiers=given.pool,
        accelerators=1,
        progress=begun.progress(),
        deaths=partial(_deaths, given.pool),
        where=ABOUT,
    )


class OwnRank:
    """The only trainer rank, an object of this process, as `policy.group.RankCalls`."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What `method` gives, called with the one rank's arguments."""
        (own,) = arguments
        return [getattr(self._rank, method)(*own)]

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` gives."""
        return self.each(method, [arguments])

    def share(self, value: Any) -> Any:
        """The value itself: nothing travels."""
        return value

    def restart(self, *arguments: Any) -> None:
        """Never asked for: a trainer that dies here takes the driver with it."""
        raise NotImplementedError


class LeanEngines:
    """The one engine, in this process, as the loop and the sampler hold it (`run.loop.Engines`)."""

    count = alive = 1

    def __init__(self, rank: Any, shape: ModelShape, config: Config, hf_dir: Path) -> None:
        """
        Args:
            rank: the trainer, from whose memory weights are copied.

        Raises:
            ValueError: a model that the lean back end does not compute.
        """
        limit = config.rollout.rollout_max_context_len
        assert limit is not None  # start-up resolved it
        self._rank, self._shape = rank, shape
        self._engine = LeanEngine(
            shape,
            read_eos_token_ids(hf_dir),
            max_context=limit,
            most_at_once=config.rollout.vllm_max_num_seqs,
        )
        self.version = 0

    prefix_caching = False
    reproducible = True

    def clients(self) -> list[Any]:
        """What the sampler asks."""
        return [self._engine]

    async def revive(self, index: int) -> Any:
        """Nothing can take the place of an engine that is this process."""
        raise EngineLostError("the engine is this process")

    def sleep(self) -> None:
        """It holds no device."""

    def wake(self) -> None:
        """It never sleeps."""

    def admit(self) -> None:
        """Nobody joins."""

    def meet_trainers(self) -> None:
        """They are objects of one process."""

    def update_weights(self, version: int) -> dict[str, float]:
        """Copy the trainer's weights, which are those of policy `version`; metrics as of other engines."""
        began = time.monotonic()
        copied = self._engine.load(iter(self._rank.export), version)
        self.version = version
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(copied),
            "weight_update_bytes_ratio": 1.0,
        }

    def idle(self, index: int) -> Any:
        """The engine."""
        return self._engine

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[Any]:
        """The engine with the weights of `hf_dir` as version 0; in the end it has the trainer's again."""
        self._engine.load(checkpoint_weights(self._shape, hf_dir), 0)
        yield self._engine
        self.update_weights(self.version)


@contextmanager
def _trainer(config: Config, checkpoint: Path | None) -> Iterator[Any]:
    """The trainer rank of a world of one; Megatron's groups are gone afterwards."""
    rank = trainer_rank(config, checkpoint)
    from megatron_ibpo.policy import parallel  # once the trainer has put its stand-ins before Megatron

    try:
        yield rank
    finally:
        parallel.destroy()
        rank.world.close()


def _deaths(pool: Pool) -> dict[str, int]:
    """Who has died so far, by metric."""
    return {"verifier_deaths": pool.deaths, "trainer_restarts": 0, "engine_deaths": 0, "engine_restarts": 0}
