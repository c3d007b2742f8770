"""The starting point of a run: its model, and the checkpoint it resumes from. Reading it takes no time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.report import load_groups, rollout_path
from megatron_ibpo.report.run_dir import CONFIG_FILE, holds_work
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.weights.formats.run_state import RUN_STATE, find_checkpoint, load_run_state
from megatron_ibpo.weights.weight_errors import CheckpointError

JOURNAL = "journal"
"""Name of the folder in a run's directory."""


@dataclass(frozen=True)
class ResumePoint:
    """The state that a run starts from."""

    checkpoint: Path | None
    """Checkpoint to resume from; None for a new run."""
    state: dict[str, Any]
    """State of the run at that checkpoint; {"step": 0} for a new one."""
    spent: Spent
    """Budget used before resuming."""
    step: int
    """Number of completed steps."""
    remembered: Mapping[int, Mapping[str, Any]]
    """Step → state that the credit of the next step needs from it, as in `Progress`."""
    notes: tuple[str, ...]
    """A line for the user that says where a resumed run starts."""


def read_resume_point(run: RunConfig, vocab_size: int) -> ResumePoint:
    """Read the state of the checkpoint in --load.

    Args:
        vocab_size: of the model, for recorded rollouts.

    Raises:
        ValueError, CheckpointError: a file is missing, cannot be read, or does not fit the model.
    """
    _check_recording(run.load_debug_rollout_data, vocab_size)
    checkpoint = _chosen_checkpoint(run.load)
    state: dict[str, Any] = {"step": 0} if checkpoint is None else load_run_state(checkpoint)
    try:
        spent = Spent.read(state.get("spent", {}))
    except ValueError as error:
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: {error}") from None
    remembered = state.get("remembered", {})
    if not isinstance(remembered, dict):
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: remembered must be an object")
    step, notes = int(state["step"]), tuple[str, ...]()
    if checkpoint is not None:
        notes = (f"resumes after step {step}, from {checkpoint}",)
    elif run.load is not None:
        notes = (f"--load {run.load}: no checkpoint was saved there; the run starts at step 0",)
    return ResumePoint(checkpoint, state, spent, step, {step: remembered} if remembered else {}, notes)


def _chosen_checkpoint(load: Path | None) -> Path | None:
    """Return the checkpoint of --load. None for a new run, for one that died before its first checkpoint and
    left a journal, and for one whose start failed."""
    if load is None:
        return None
    start_failed = (load / CONFIG_FILE).is_file() and not holds_work(load)
    may_lack_one = start_failed or (load / JOURNAL).is_dir()
    try:
        return find_checkpoint(load)
    except CheckpointError:
        if may_lack_one:
            return None
        raise


def _check_recording(directory: Path | None, vocab_size: int) -> None:
    """Read the first recorded step, so that a wrong directory is noticed before any process starts.

    Raises:
        ValueError: there is no recording, or its token ids are beyond the model's vocabulary.
    """
    if directory is None:
        return
    path = min(directory.glob("step_*.json"), default=rollout_path(directory, 1))
    for group in load_groups(path)[1]:
        for response in group.responses:
            if any(not 0 <= number < vocab_size for number in response.token_ids.tolist()):
                raise ValueError(
                    f"recorded rollouts {path}: token ids beyond the model's vocabulary of "
                    f"{vocab_size}; replay with the model of the recording"
                )
