"""The parts of a run in progress, and its counters."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_ibpo.basics.records import Floats, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.credit import (
    CreditContext,
    LogProbQuery,
)
from megatron_ibpo.engines.probe import IdleEngine
from megatron_ibpo.journal import Journal
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.report import (
    Report,
    Stages,
)
from megatron_ibpo.report.run_dir import DiskWait
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.resolve import Foundation
from megatron_ibpo.run.rollouts import Fleet, Rollouts
from megatron_ibpo.run.run_data import RunData


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


class Engines(Fleet, Protocol):
    """The engines of a run, as the loop controls them: those of a cluster (`cluster.Engines`), or one in this
    process."""

    @property
    def count(self) -> int:
        """Total number of engines."""
        ...

    @property
    def alive(self) -> int:
        """Number of engines that can take requests."""
        ...

    @property
    def reproducible(self) -> bool:
        """True if an idle engine computes the same requests in the same batches every time."""
        ...

    def sleep(self) -> None:
        """Release shared devices to the trainers."""
        ...

    def wake(self) -> None:
        """Get ready to sample again."""
        ...

    def admit(self) -> None:
        """Admit engines that are up again, while the trainers are idle."""
        ...

    def update_weights(self, version: int) -> dict[str, float]:
        """Load the trainers' weights as policy `version`, and return metrics of the update."""
        ...

    def meet_trainers(self) -> None:
        """Connect to trainers that have just started."""
        ...

    def idle(self, index: int) -> IdleEngine:
        """Return one engine for the caller's exclusive use."""
        ...

    def fresh(self, index: int, hf_dir: Path) -> AbstractContextManager[IdleEngine]:
        """Provide a fresh engine with the weights of `hf_dir` as version 0, in place of the engine at
        `index`."""
        ...


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
    return CreditContext(
        run.config.algorithm,
        run.config.rollout,
        run.data.vocabulary,
        run.foundation.max_context,
        run.config.run.seed,
        step,
        run.config.data.reward_threshold,
        partial(logprobs, run),
        run.policy.values,
        run.cost.of_sample,
        run.progress.remembered.get(step, {}),
    )


def logprobs(run: Run, queries: list[LogProbQuery]) -> list[Floats]:
    """Return the policy's log-probs of continuations, for credit."""
    with run.stages("log-probs"):
        return run.policy.logprobs([as_sequence(query) for query in queries])


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
