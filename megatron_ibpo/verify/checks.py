"""All checks: those of one process, and those over one start of the run's trainers and engines."""

import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import samples_in_trainer
from megatron_ibpo.run import saving
from megatron_ibpo.run import steps as loop
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


def check_live(subject: Subject, only: Collection[str]) -> Iterator[Row]:
    """Open the run, take two steps, and make the checks named in `only`."""
    turns: set[Turn] = set()

    def rows(check: str, work: Callable[[], Iterable[Row]]) -> list[Row]:
        return attempted(check, work) if check.partition(":")[0] in only else []

    with redirect_stdout(sys.stderr), open_run(subject.small) as run:
        if isinstance(run.rollouts, LiveRollouts):  # a recording has no sampler
            run.rollouts.sampler.on_sample = lambda sample: turns.add(as_turn(sample))
        export = partial(_export, run)
        initial = export("initial")
        groups = loop.sample(run)
        sequences = loop.credit(run, groups).sequences
        yield from rows("engine: before", lambda: engine_rows("before an update", run, groups, initial))
        yield from rows("tokens: samples", lambda: check_samples(subject, groups, sequences, turns))
        yield from rows("tokens: cut responses", lambda: check_cut(subject, run))
        metrics = _train(run, sequences)
        updated = export("updated")
        if not samples_in_trainer(subject.small.rollout.rollout_backend):
            step = partial(_layout_row, subject, run.config, sequences, metrics, initial, updated)
            yield from rows("split: the run's layout", lambda: [step()])
        saving.save_if_due(run)
        run.policy.saved(wait=True)
        second = loop.sample(run)
        second_sequences = loop.credit(run, second).sequences
        yield from rows("engine: after", lambda: engine_rows("after an update", run, second, updated))
        _train(run, second_sequences)
        yield from rows("memory", lambda: check_memory(run))
        undisturbed = export("undisturbed")
        yield from rows("arrival", lambda: check_arrival(subject, run, export))
    with redirect_stdout(sys.stderr):
        yield from rows("resume", lambda: check_resume(subject.small, [groups, second], undisturbed))


def _train(run: Run, sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Take the step's update, and send the weights to the engines. Return the update's metrics."""
    metrics = loop.update(run, sequences)
    loop.sync(run)
    return metrics


def _export(run: Run, name: str) -> Path:
    """Write the present weights; return their directory."""
    directory = run.config.run.run_dir.parent / name
    run.policy.save_hf(directory)
    return directory


def _layout_row(
    subject: Subject, config: Config, sequences: Sequence[TrainSequence], metrics: dict[str, float],
    initial: Path, updated: Path,
) -> Row:  # fmt: skip
    """Compare the first step of the run's ranks with the same step of one rank in this process."""
    if not any(s.has_advantage for s in sequences):
        raise NotCheckedError("no response has an advantage: all rewards of a prompt are the same")
    lr = metrics["learning_rate"]
    update = Update(changes(weights_in(initial), weights_in(updated), lr), metrics, ROUNDING / lr)
    check = f"split: the run's layout, {config.cluster.num_trainers} ranks"
    return compared(check, update, update_on_one_rank(config, sequences), subject)
