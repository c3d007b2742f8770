"""All checks: those of one process, and those over one start of the run's trainers and engines."""

import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.run import loop, saving
from megatron_ibpo.run.open import open_run
from megatron_ibpo.run.rollouts import LiveRollouts
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.arrival import check_arrival
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.engine import engine_rows
from megatron_ibpo.verify.memory import check_memory
from megatron_ibpo.verify.one_rank import ROUNDING, Update, changes, update_on_one_rank, weights_in
from megatron_ibpo.verify.prompts import check_data
from megatron_ibpo.verify.reference import check_reference
from megatron_ibpo.verify.resume import check_resume
from megatron_ibpo.verify.rewards import check_rewards
from megatron_ibpo.verify.rows import CHECKS, NotCheckedError, Row, attempted, in_order
from megatron_ibpo.verify.small_run import described, small_run
from megatron_ibpo.verify.split import check_split, compared
from megatron_ibpo.verify.tokens import Turn, as_turn, check_cut, check_samples, check_tokens

WITHOUT_ENGINE: dict[str, Callable[[Subject], Iterable[Row]]] = {
    "rewards": check_rewards,
    "data": check_data,
    "tokens": check_tokens,
    "split": check_split,
    "reference": check_reference,
}
"""Checks that need no engine, quick ones first."""
LIVE = ("engine", "arrival", "resume", "memory")
"""Checks that need the run's processes. `split` and `tokens` have a part that does."""


def run_checks(
    config: Config, *, full: bool = False, only: Collection[str] = CHECKS
) -> tuple[list[Row], dict[str, Any]]:
    """Make the checks named in `only`. Return (rows in the order of CHECKS, what verify.json says about the
    settings)."""
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ibpo-verify-") as scratch:
        small = small_run(config, Path(scratch), full=full)
        subject = Subject(config, small, full)
        for name, check in WITHOUT_ENGINE.items():
            if name in only:
                rows += _reported(name, partial(check, subject))
        needs_run = [name for name in LIVE if name in only]
        if "split" in only and (small.cluster.num_trainers or 1) > 1:
            needs_run.append("split")
        if needs_run:
            rows += _reported(needs_run[0], partial(check_live, subject, only))
        about = described(config, small)
    missing = set(only) - {row.check.partition(":")[0] for row in rows}
    rows += [Row(name, "not checked", reason="the run ended before it") for name in missing]
    return in_order(rows), about | {"full": full, "seconds": round(time.monotonic() - began, 1)}


def _reported(name: str, check: Callable[[], Iterable[Row]]) -> list[Row]:
    """Return the rows of a check, and print each as soon as it is there."""

    def rows() -> Iterator[Row]:
        for row in check():
            print(f"  {row.verdict}: {row.check}", file=sys.stderr, flush=True)
            yield row

    print(f"checking {name} …", file=sys.stderr, flush=True)
    return attempted(name, rows)


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

    def rows(check: str, work: Callable[[], Iterable[Row]]) -> list[Row]:
        return attempted(check, work) if check.partition(":")[0] in only else []

    with redirect_stdout(sys.stderr), open_run(subject.small) as run:
        live = LiveRun(subject, run)
        initial = live.export("initial")
        live.sample()
        (groups,), (sequences,) = live.groups, live.sequences
        yield from rows("engine: before", partial(engine_rows, "before an update", run, groups, initial))
        yield from rows("tokens: samples", lambda: check_samples(subject, groups, sequences, live.turns))
        yield from rows("tokens: cut responses", lambda: check_cut(subject, run))
        live.train()
        if not samples_in_trainer(subject.small.rollout.rollout_backend):
            yield from rows("split: the run's layout", lambda: _layout(live, initial))
        saving.save_if_due(run)
        run.policy.saved(wait=True)
        live.sample()
        updated = live.export("updated")
        yield from rows("engine: after", lambda: engine_rows("after an update", run, live.groups[1], updated))
        live.train()
        yield from rows("memory", lambda: check_memory(run))
        undisturbed = live.export("undisturbed")
        yield from rows("arrival", lambda: check_arrival(subject, run, live.export))
    with redirect_stdout(sys.stderr):
        yield from rows("resume", lambda: check_resume(subject.small, live.groups, undisturbed))


def _layout(live: LiveRun, initial: Path) -> Iterator[Row]:
    """Compare the first step of the run's ranks with the same step of one rank in this process."""
    sequences, config = live.sequences[0], live.run.config
    if not any(s.has_advantage for s in sequences):
        raise NotCheckedError("no response has an advantage: all rewards of a prompt are the same")
    lr = live.metrics[0]["learning_rate"]
    change = changes(weights_in(initial), weights_in(live.export("first")), lr)
    on_one_rank = update_on_one_rank(config, sequences)
    check = f"split: the run's layout, {config.cluster.num_trainers} ranks"
    yield compared(check, Update(change, live.metrics[0], ROUNDING / lr), on_one_rank, live.subject)
