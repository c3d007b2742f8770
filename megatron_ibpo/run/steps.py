"""The training loop and the stages of a step, for the command as a whole and for programs in Python.

This process is the driver. It starts trainers, engines and verifiers, holds prompts, samples and credit, and
has no model itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.config import Config
from megatron_ibpo.credit import Credit, assign_credit
from megatron_ibpo.credit.explanation import GroupExplanation
from megatron_ibpo.data.hub import prepare_upload, upload_export, with_local_copies
from megatron_ibpo.engines.registry import check_recorded
from megatron_ibpo.run import observers, saving
from megatron_ibpo.run import open as opening
from megatron_ibpo.run.saving import admit_engines, remember, sleep_engines, surviving, wake_engines
from megatron_ibpo.run.settings import check_installed, check_settings
from megatron_ibpo.run.state import Run, context
from megatron_ibpo.run.stop_request import StopRequest


class NotFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def sample(run: Run) -> list[Group]:
    """Return this step's groups: responses, scores, and the corrections that the algorithm requests."""
    wake_engines(run)
    with run.stages("sample"):
        groups = run.rollouts.groups(run.progress.step, context(run), partial(admit_engines, run))
    run.cost.sampling(run.rollouts.sampled)
    return groups


def credit(run: Run, groups: list[Group]) -> Credit:
    """Turn the groups into training sequences with advantages and weights. Raises ValueError for recorded
    samples that the loss cannot use (`check_recorded`)."""
    sleep_engines(run)  # credit may need the policy or the critic, and training follows
    with run.stages("credit"):
        assigned = surviving(run, lambda: assign_credit(groups, context(run), run.foundation.method))
    if not run.config.run.debug_rollout_only:
        check_recorded(run.config, assigned.sequences)
    _count_passes(run)
    remember(run, run.progress.step, assigned)
    return assigned


def update(run: Run, sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Run the optimizer steps of one rollout. Raises NotFiniteError if --max-nonfinite-steps consecutive
    steps were skipped."""
    if run.config.run.debug_rollout_only:
        return {}
    run.progress.old_logprobs = observers.observed_logprobs(run, sequences)
    with run.stages("train"):
        metrics = surviving(run, lambda: run.policy.update(sequences))
    _count_passes(run)
    run.progress.new_logprobs = observers.observed_logprobs(run, sequences)
    progress, limit = run.progress, run.config.run.max_nonfinite_steps
    progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if metrics["updates_skipped"] else 0
    if progress.skipped_in_a_row >= limit:
        raise NotFiniteError(
            f"{limit} steps in a row had a loss or gradient that is not finite; lower --lr, or look at "
            "the records kept by --save-debug-rollout-data"
        )
    return metrics


def sync(run: Run) -> dict[str, float]:
    """Count the step, and send the trainers' weights to the engines. Raises WeightMismatchError if, with
    --check-weight-update-equal, the engines have other weights."""
    run.progress.step += 1
    if run.engines is None or run.config.run.debug_rollout_only:
        return {}
    with run.stages("sync"):
        metrics = surviving(run, partial(run.engines.update_weights, run.progress.step))
        run.rollouts.advance(run.progress.step)
    if run.config.rollout.check_weight_update_equal and not run.progress.weights_checked:
        with run.stages("check weights"):
            observers.check_against_fresh_engine(run, run.engines)
    return metrics


def _count_passes(run: Run) -> None:
    for passes in run.policy.take_passes():
        run.cost.training(**vars(passes))


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
    Raises what a stage raises; the journal then has what was sampled."""
    cuts_short = stop.cuts_short if stop is not None else lambda work: work()
    evaluate = partial(observers.evaluate_if_due, run)
    cuts_short(evaluate)
    cuts_short(partial(observers.measure_corrections_if_due, run))
    while not (run.done() or (stop is not None and stop.requested)):
        groups = sample(run)
        assigned = credit(run, groups)
        metrics = observers.measure_gradient_if_due(run, groups, assigned.sequences)
        metrics |= update(run, assigned.sequences)
        metrics |= sync(run)
        observers.report(run, groups, assigned, metrics)
        step = Step(dict(run.reporter.rows[-1]), groups, assigned.sequences, assigned)
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
        """Return the next step, after training it. Raises StopIteration: all steps are done, and ValueError
        if the run is closed."""
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
