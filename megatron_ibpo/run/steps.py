"""The training loop, for the command as a whole and for programs in Python step by step.

This process is the driver. It starts trainers, engines and verifiers, holds prompts, samples and credit, and
has no model itself.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.credit import Credit
from megatron_ibpo.credit.explanation import GroupExplanation
from megatron_ibpo.data.hub import prepare_upload, upload_export, with_local_copies
from megatron_ibpo.run import loop, observers, saving, step_report
from megatron_ibpo.run import open as opening
from megatron_ibpo.run.checks import check_installed, check_settings
from megatron_ibpo.run.state import Run
from megatron_ibpo.run.stop_request import StopRequest


@dataclass(frozen=True, eq=False)
class Step:
    """A completed training step."""

    metrics: dict[str, Any]
    """The step's row of metrics.jsonl: `step`, numbers by name, and `seconds` by stage."""
    groups: list[Group]
    """The step's prompts with their scored responses and corrections."""
    sequences: list[TrainSequence]
    """The sequences trained on, with advantage and weight."""
    credit: Credit
    """The sequences with what made their advantages."""

    @property
    def explanations(self) -> list[GroupExplanation]:
        """The explanation of every advantage, by group; `print(step.explanations[0])` shows the sums."""
        return self.credit.explanations


def steps(run: Run, stop: StopRequest | None = None) -> Iterator[Step]:
    """Train, and yield every completed step, until all are done or `stop` is requested. The first step is
    preceded by the first evaluation, and each is followed by its checkpoint and evaluation if they are due.

    Raises:
        Exception: what a stage raises (`run.loop`); the journal then has what was sampled.
    """
    cuts_short = stop.cuts_short if stop is not None else lambda work: work()
    evaluate = partial(observers.evaluate_if_due, run)
    cuts_short(evaluate)
    cuts_short(partial(observers.measure_corrections_if_due, run))
    while not (run.done() or (stop is not None and stop.requested)):
        groups = loop.sample(run)
        credit = loop.credit(run, groups)
        metrics = observers.measure_gradient_if_due(run, groups, credit.sequences)
        metrics |= loop.update(run, credit.sequences)
        metrics |= loop.sync(run)
        step_report.report(run, groups, credit, metrics)
        step = Step(dict(run.reporter.rows[-1]), groups, credit.sequences, credit)
        saving.save_if_due(run)
        cuts_short(evaluate)
        yield step


def open_run(config: Config) -> "OpenRun":
    """Open a run to step it from Python, as the command `train` opens it.

    Args:
        config: settings from `load_recipe` or `parse_config`. `config.run.load` resumes a run.

    Raises:
        ConfigError: the settings cannot work, or a package is missing.
        ValueError, OSError, EngineError, ProcessDiedError: says what is wrong, where, and what to do.
    """
    check_settings(config)
    check_installed()
    prepare_upload(config.run)
    return OpenRun(with_local_copies(config))


class OpenRun:
    """A run in progress: an iterator of its steps, and a context manager that closes it.

    Closing saves a checkpoint, exports the policy, writes the summary and ends all processes. After a
    `break`, iteration continues with the next step. A step that raises, by Ctrl-C too, closes the run without
    saving, as leaving the context by an exception does; `load` then resumes it from its last checkpoint and
    its journal.
    """

    def __init__(self, config: Config):
        """Open the run. Raises as `run.open.open_run`."""
        self._stack = ExitStack()
        self._run = self._stack.enter_context(opening.open_run(config, started=time.time()))
        self._steps = steps(self._run)
        self._is_closed = False

    @property
    def config(self) -> Config:
        """The settings, with everything resolved that depends on model, data and devices."""
        return self._run.config

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far, of steps and evaluations."""
        return list(self._run.reporter.rows)

    def __iter__(self) -> "OpenRun":
        return self

    def __next__(self) -> Step:
        """Return the next step, after training it.

        Raises:
            StopIteration: all steps are done.
            ValueError: the run is closed.
        """
        if self._is_closed:
            raise ValueError(
                "this run is closed: open it again, with its directory as `load`, to train further"
            )
        try:
            return next(self._steps)
        except StopIteration:
            raise
        except BaseException as error:
            self._leave(error)
            raise

    def close(self) -> None:
        """Save, export the policy, write the summary, and end all processes; upload the export if asked to. A
        closed run stays as it is.
        """
        if self._is_closed:
            return
        done = self._run.done()
        try:
            saving.finish(self._run, "finished" if done else "interrupted")
        except BaseException as error:
            self._leave(error)
            raise
        self._leave(None)
        upload_export(self.config.run, stopped=not done)

    def __enter__(self) -> "OpenRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End all processes, and record in the summary the error that the run ends with."""
        self._is_closed = True
        self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
