"""The parts of a run in progress, its counters, and its processes with the back ends that start them."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from megatron_ibpo.basics.records import Floats, TrainSequence
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.config import Config
from megatron_ibpo.credit import CreditContext, LogProbQuery
from megatron_ibpo.environments import Sessions
from megatron_ibpo.journal import Journal
from megatron_ibpo.models import ModelShape
from megatron_ibpo.policy.group import Policy, RankCalls
from megatron_ibpo.report import Report, Stages
from megatron_ibpo.report.run_dir import DiskWait
from megatron_ibpo.rewards import Pool
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.inputs import Inputs, Judges, RunData
from megatron_ibpo.run.resolve import Foundation, ResolvedConfig
from megatron_ibpo.run.rollouts import Engines, Rollouts

T_co = TypeVar("T_co", covariant=True)


@dataclass
class Progress:
    """Counters of a run that change from step to step."""

    step: int = 0
    """Completed steps."""
    trainer_restarts: int = 0
    deaths_in_a_row: int = 0
    """Deaths of trainers since the last completed step."""
    saved: int = 0
    """Steps completed when the last save began."""
    whole: int = 0
    """Steps completed at the last complete checkpoint."""
    saved_at: float = field(default_factory=time.monotonic)
    start_seconds: dict[str, float] = field(default_factory=dict)
    skipped_in_a_row: int = 0
    """Consecutive steps whose update was skipped."""
    remembered: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Completed steps → the memory of their credit for the next step (`Credit.memory`); entries since the
    last complete checkpoint."""
    weights_checked: bool = False
    """True once --check-weight-update-equal has compared an engine with a fresh one."""
    old_logprobs: list[Floats] | None = None
    """The trainers' log-probs before this step's update, with --save-debug-rollout-data; `new_logprobs` holds
    those after it."""
    new_logprobs: list[Floats] | None = None


@dataclass
class Run:
    """A run in progress."""

    config: Config
    foundation: Foundation
    data: RunData
    rollouts: Rollouts
    """Source of samples and rewards: engines and verifiers, or a recording."""
    journal: Journal
    policy: Policy
    engines: Engines | None
    """None when recorded rollouts are replayed."""
    reporter: Report
    disk: DiskWait
    stages: Stages
    cost: CostMeter
    progress: Progress

    def done(self) -> bool:
        """Return whether all steps are done, or the budget is spent."""
        run = self.config.run
        within = run.budget is None or self.cost.spent.amount(run.budget_unit) < run.budget
        return self.progress.step >= run.num_rollout or not within


def context(run: Run, step: int | None = None) -> CreditContext:
    """Return the context of the step after `step` completed ones; None: the present step."""
    step = run.progress.step if step is None else step

    def logprobs(queries: list[LogProbQuery]) -> list[Floats]:
        with run.stages("log-probs"):
            return run.policy.logprobs([as_sequence(query) for query in queries])

    return CreditContext(
        run.config.algorithm,
        run.config.rollout,
        run.data.vocabulary,
        run.foundation.max_context,
        run.config.run.seed,
        step,
        run.config.data.reward_threshold,
        logprobs,
        run.policy.values,
        run.cost.of_sample,
        run.progress.remembered.get(step, {}),
    )


def as_sequence(query: LogProbQuery) -> TrainSequence:
    """Return the sequence for which the trainers compute log-probs; it is not trained on."""
    return TrainSequence(
        query.context,
        query.continuation,
        np.ones(len(query.continuation), bool),
        advantage=0.0,
        weight=0.0,
        prompt_index=0,
        group=0,
        index=0,
        temperature=query.temperature,
    )


@dataclass(frozen=True)
class Processes:
    """Trainers, engines and verifiers that have been started."""

    trainers: RankCalls
    engines: Engines | None
    """None when recorded rollouts are replayed."""
    verifiers: Pool
    deaths: Callable[[], dict[str, int]]
    """Returns the counts of dead and restarted engines, verifiers and environments so far, by metric."""
    placement_note: str
    """Nodes of the processes, for the user."""
    wait_ready: Callable[[], None] = lambda: None
    """Waits for the processes that the first step needs and start-up does not."""
    environments: Sessions | None = None
    """Places for episodes; None if no prompt names an environment."""


@dataclass(frozen=True)
class Launched(Generic[T_co]):
    """Processes that have been started and have loaded nothing yet."""

    memory: Mapping[int, int]
    """Node, by its index in the placement → its bytes of main memory; empty in one process."""
    build: Callable[[Path | None], T_co]
    """Builds the model of the trainers from a checkpoint, or as a new one. Engines and verifiers may still be
    starting when it returns."""


class Backend(Protocol):
    """A way to start the processes of a run: on a cluster (`on_cluster.OnCluster` says what each method
    does), or all in the driver's own process."""

    def check(self, config: Config, shape: ModelShape) -> None: ...
    def connect(self, config: Config) -> AbstractContextManager[Callable[[], None]]: ...
    def place(self, config: Config, *, samples: bool = True) -> Placement: ...
    def launch(
        self, resolved: ResolvedConfig, inputs: Inputs, judges: Judges, stack: ExitStack
    ) -> Launched[Processes]: ...
    def launch_trainers(
        self, resolved: ResolvedConfig, stack: ExitStack
    ) -> Launched[tuple[RankCalls, str]]: ...
