"""Checkpoints and exports of a run in progress, and new trainers from a checkpoint after the death of one."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.credit import Credit, assign_credit
from megatron_ibpo.report.run_dir import is_full
from megatron_ibpo.run.state import Run, context
from megatron_ibpo.weights.formats.run_state import Keep, load_run_state, newest_step

T = TypeVar("T")


def save_if_due(run: Run) -> None:
    """Start a Megatron checkpoint after the last step and every --save-interval steps or
    --save-interval-minutes; continue one in progress. Export every --export-interval steps. Raises OSError or
    CheckpointError if a save failed, and DiskFullError if the disk was full for longer than --disk-wait."""
    settings, step = run.config.run, run.progress.step
    if not settings.save:
        if _journal_is_full(run):
            run.journal.saved(step)  # no run resumes from before it, so free the disk
        return
    with run.stages("save"):
        surviving(run, partial(_advance_saves, run))


def finish(run: Run, status: str) -> None:
    """Save the rest, wait for it, export the policy in Hugging Face format, draw the curves, write the
    summary. Raises as `save_if_due`."""
    settings = run.config.run
    if settings.save:
        with run.stages("save"):
            surviving(run, partial(_save_the_rest, run))
    seconds = run.progress.start_seconds | run.stages.take()
    run.reporter.finish(status=status, seconds=seconds)


def _advance_saves(run: Run) -> None:
    settings, step = run.config.run, run.progress.step
    due = run.done() or _journal_is_full(run) or is_time_to_save(settings, step, run.progress.saved_at)
    _settle_save(run, wait=due)
    if due:
        run.disk.write(partial(_begin_save, run))
    if settings.export_interval is not None and step % settings.export_interval == 0:
        _export(run, settings.run_dir / f"hf_step_{step:06d}")


def _save_the_rest(run: Run) -> None:
    _settle_save(run, wait=True)
    if run.progress.step > run.progress.saved:
        run.disk.write(partial(_begin_save, run))
        _settle_save(run, wait=True)
    _export(run, run.config.run.run_dir / "hf")


def is_time_to_save(settings: RunConfig, step: int, saved_at: float) -> bool:
    """Return whether a checkpoint is due by --save-interval or --save-interval-minutes.

    Args:
        saved_at: time.monotonic() of the last one.
    """
    minutes = settings.save_interval_minutes
    at_interval = settings.save_interval is not None and step % settings.save_interval == 0
    return at_interval or (minutes is not None and time.monotonic() - saved_at >= 60 * minutes)


def _journal_is_full(run: Run) -> bool:
    """Return whether the journal holds more than --journal-keep that is needed until a checkpoint is
    saved."""
    return run.journal.pending_bytes > run.config.run.journal_keep * 1024**3


def _export(run: Run, directory: Path) -> None:
    sleep_engines(run)
    run.disk.write(lambda: run.policy.save_hf(directory))


def _begin_save(run: Run) -> None:
    sleep_engines(run)  # trainers need their whole state; the next sampling wakes the engines
    settings = run.config.run
    state = {"seed": settings.seed, "spent": asdict(run.cost.spent), **run.rollouts.state()}
    if remembered := run.progress.remembered.get(run.progress.step):
        state["remembered"] = remembered
    keep = Keep(settings.keep_checkpoints, settings.keep_checkpoint_every)
    run.policy.save(settings.run_dir / "checkpoints", run.progress.step, state, keep)
    run.progress.saved, run.progress.saved_at = run.progress.step, time.monotonic()


def _settle_save(run: Run, *, wait: bool) -> None:
    """Continue the save in progress. If it found the disk full, save the present step once there is
    room."""
    try:
        is_complete = run.policy.saved(wait=wait)
    except OSError as error:
        if not is_full(error):
            raise
        is_complete = run.disk.write(partial(_save_now, run))
    if is_complete and run.progress.saved > run.progress.whole:
        run.progress.whole = run.progress.saved
        run.disk.write(lambda: run.journal.saved(run.progress.whole))


def _save_now(run: Run) -> bool:
    _begin_save(run)
    return run.policy.saved(wait=True)


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
    """Return the result of `work`. If a trainer dies during it, start new trainers, bring them to the present
    step, and repeat it. Raises ProcessDiedError if trainers died MOST_DEATHS times without a completed step
    in between."""
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
    recent = {at: memory for at, memory in run.progress.remembered.items() if at >= run.progress.whole}
    run.progress.remembered = recent | ({step + 1: credit.memory} if credit.memory else {})
