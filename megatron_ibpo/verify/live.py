"""Two steps of the run with its engines, trainers and layout, and what must be so before and after them."""

import sys
from collections.abc import Collection, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.run import loop, saving
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.arrival import check_arrival
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.engine import engine_rows
from megatron_ibpo.verify.memory import check_memory
from megatron_ibpo.verify.own_policy import ROUNDING, Update, changes, own_update, weights_in
from megatron_ibpo.verify.resume import check_resume
from megatron_ibpo.verify.rows import NotCheckedError, Row, attempted
from megatron_ibpo.verify.split import compared
from megatron_ibpo.verify.tokens import Turn, as_turn, check_cut, check_samples

LIVE = ("split", "engine", "tokens", "resume", "arrival", "memory")
"""Checks that need the run's processes."""


@dataclass
class LiveRun:
    """A run in progress, with what its steps left."""

    subject: Subject
    run: Run
    groups: list[list[Group]] = field(default_factory=list)
    """Groups of each step."""
    sequences: list[list[TrainSequence]] = field(default_factory=list)
    """Sequences that each step trained on."""
    turns: set[Turn] = field(default_factory=set)
    """All that engines wrote."""
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.run.rollouts, LiveRollouts):  # a recording has no sampler
            self.run.rollouts.sampler.on_sample = lambda sample: self.turns.add(as_turn(sample))

    def sample(self) -> None:
        """Sample the next step, and assign its credit."""
        self.groups.append(loop.sample(self.run))
        self.sequences.append(loop.credit(self.run, self.groups[-1]).sequences)

    def train(self) -> None:
        """Take the step's update, and send the weights to the engines."""
        self.metrics.append(loop.update(self.run, self.sequences[-1]))
        loop.sync(self.run)

    def export(self, name: str) -> Path:
        """Write the present weights; return their directory."""
        directory = self.subject.small.run.run_dir.parent / name
        self.run.policy.save_hf(directory)
        return directory


def check_live(subject: Subject, only: Collection[str]) -> Iterator[Row]:
    """Open the run, take two steps, and make the checks named in `only`."""

    def wanted(name: str) -> bool:
        return name in only

    with redirect_stdout(sys.stderr), open_run(subject.small) as run:
        live = LiveRun(subject, run)
        initial = live.export("initial")
        live.sample()
        if wanted("engine"):
            yield from attempted("engine: before an update", partial(_engine, live, initial, "before"))
        if wanted("tokens"):
            yield from attempted("tokens", partial(_samples, live))
            yield from attempted("tokens: cut responses", partial(check_cut, subject, run))
        live.train()
        if wanted("split") and not samples_in_trainer(subject.small.rollout.rollout_backend):
            yield from attempted("split: the run's layout", partial(_layout, live, initial))
        saving.save_if_due(run)
        run.policy.saved(wait=True)
        live.sample()
        if wanted("engine"):
            after = live.export("after")
            yield from attempted("engine: after an update", partial(_engine, live, after, "after"))
        live.train()
        if wanted("memory"):
            yield from attempted("memory", partial(check_memory, run))
        undisturbed = live.export("undisturbed")
        if wanted("arrival"):
            yield from attempted("arrival", partial(check_arrival, subject, run, live.export))
    if wanted("resume"):
        with redirect_stdout(sys.stderr):
            resumed = partial(check_resume, subject.small, live.groups, undisturbed)
            yield from attempted("resume", resumed)


def _samples(live: LiveRun) -> Iterator[Row]:
    return check_samples(live.subject, live.groups[0], live.sequences[0], live.turns)


def _engine(live: LiveRun, hf_dir: Path, when: str) -> Iterator[Row]:
    return engine_rows(f"{when} an update", live.run, live.groups[-1], hf_dir)


def _layout(live: LiveRun, initial: Path) -> Iterator[Row]:
    """Compare the first step of the run's ranks with the same step of one rank in this process."""
    sequences, config = live.sequences[0], live.run.config
    if not any(s.has_advantage for s in sequences):
        raise NotCheckedError("no response has an advantage: all rewards of a prompt are the same")
    lr = live.metrics[0]["learning_rate"]
    moved = changes(weights_in(initial), weights_in(live.export("first")), lr)
    own = own_update(config, sequences)
    check = f"split: the run's layout, {config.cluster.num_trainers} ranks"
    yield compared(check, Update(moved, live.metrics[0], ROUNDING / lr), own, live.subject)
