"""Checkpoints and exports of a run in progress."""

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_ibpo.report.disk import is_full
from megatron_ibpo.run.recovery import sleep_engines, surviving
from megatron_ibpo.run.state import Run
from megatron_ibpo.weights.formats.run_state import Keep


def save_if_due(run: Run) -> None:
    """Start a Megatron checkpoint after the last step and every --save-interval steps or
    --save-interval-minutes; continue one in progress. Export every --export-interval steps.

    Raises:
        OSError, CheckpointError: a save failed.
        DiskFullError: the disk was full for longer than --disk-wait.
    """
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
    due = run.done() or _save_is_due(run)
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


def _save_is_due(run: Run) -> bool:
    settings, minutes = run.config.run, run.config.run.save_interval_minutes
    at_interval = settings.save_interval is not None and run.progress.step % settings.save_interval == 0
    return (
        at_interval
        or _journal_is_full(run)
        or (minutes is not None and time.monotonic() - run.progress.saved_at >= 60 * minutes)
    )


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
        whole = run.policy.saved(wait=wait)
    except OSError as error:
        if not is_full(error):
            raise
        whole = run.disk.write(partial(_save_now, run))
    if whole and run.progress.saved > run.progress.whole:
        run.progress.whole = run.progress.saved
        run.disk.write(lambda: run.journal.saved(run.progress.whole))


def _save_now(run: Run) -> bool:
    _begin_save(run)
    return run.policy.saved(wait=True)
