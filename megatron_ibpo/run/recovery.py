"""The death of trainers, and engines that sleep and join while a run goes on."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.credit import Credit, assign_credit
from megatron_ibpo.run.state import Run, context
from megatron_ibpo.weights.formats.run_state import load_run_state, newest_step

T = TypeVar("T")


def wake_engines(run: Run) -> None:
    """Get the engines ready to sample again."""
    if run.engines is not None:
        surviving(run, run.engines.wake)


def sleep_engines(run: Run) -> None:
    """Have the engines release the devices that they share with the trainers."""
    if run.engines is not None:
        run.engines.sleep()


def admit_engines(run: Run) -> None:
    """Admit restarted engines while the loop waits for samples; trainers then have the engines' weights
    and are idle."""
    if run.engines is not None:
        surviving(run, run.engines.admit)


def surviving(run: Run, work: Callable[[], T]) -> T:
    """Return the result of `work`. If a trainer dies during it, start new trainers, bring them to the
    present step, and repeat it.

    Raises:
        ProcessDiedError: trainers died MOST_DEATHS times without a completed step in between.
    """
    while True:
        try:
            return work()
        except ProcessDiedError as death:
            _replace_trainers(run, death)


def _replace_trainers(run: Run, death: ProcessDiedError) -> None:
    """Start new trainers from the last checkpoint and train them again on the journal's samples. Nothing
    is sampled again, engines stay up (asleep if they share the trainers' GPUs), and the weights come out
    the same."""
    progress = run.progress
    while True:
        progress.deaths_in_a_row += 1
        if progress.deaths_in_a_row >= MOST_DEATHS:
            raise death
        run.reporter.note(f"{death}\nall trainers start again from the last checkpoint")
        try:
            with run.stages("recover"):
                _train_again(run)
        except ProcessDiedError as again:
            death = again
            continue
        progress.trainer_restarts += 1
        run.reporter.note(f"the trainers are back at step {progress.step}")
        return


def _train_again(run: Run) -> None:
    settings, progress = run.config.run, run.progress
    checkpoint = newest_step(settings.run_dir)
    if checkpoint is None and settings.load is not None:
        checkpoint = newest_step(settings.load)
    done = 0 if checkpoint is None else load_run_state(checkpoint)["step"]
    sleep_engines(run)  # trainers build and train; the next sampling wakes the engines
    run.policy.restart(checkpoint)
    if run.engines is not None:
        run.engines.meet_trainers()
    progress.saved = progress.whole
    steps = range(done, progress.step if not settings.debug_rollout_only else done)
    for step, groups in zip(steps, run.rollouts.past(steps, partial(context, run)), strict=True):
        credit = assign_credit(groups, context(run, step), run.foundation.method)
        remember(run, step, credit)
        run.policy.update(credit.sequences)
    run.policy.take_passes()  # repeated work after a death is no cost of the algorithm


def remember(run: Run, step: int, credit: Credit) -> None:
    """Store the state that credit carries from the step after `step` completed ones to the next."""
    kept = {at: memory for at, memory in run.progress.remembered.items() if at >= run.progress.whole}
    run.progress.remembered = kept | ({step + 1: credit.memory} if credit.memory else {})
