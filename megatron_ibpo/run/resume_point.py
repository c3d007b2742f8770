"""The starting point of a run: its model, and the checkpoint it resumes from. Reading it takes no time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.plan.machine import find_machine
from megatron_ibpo.report import load_groups, rollout_path
from megatron_ibpo.report.run_dir import CONFIG_FILE, holds_work
from megatron_ibpo.run.cost import Spent
from megatron_ibpo.run.loop import Progress
from megatron_ibpo.weights.formats.run_state import RUN_STATE, find_checkpoint, load_run_state
from megatron_ibpo.weights.weight_errors import CheckpointError

JOURNAL = "journal"
"""Name of the folder in a run's directory."""


@dataclass(frozen=True)
class ResumePoint:
    """The model of a run and the state it starts from."""

    config: Config
    """The configuration with the context length resolved."""
    hf_dir: Path
    shape: ModelShape
    checkpoint: Path | None
    """Checkpoint to resume from; None for a new run."""
    state: dict[str, Any]
    """State of the run at that checkpoint; {"step": 0} for a new one."""
    spent: Spent
    """Budget used before resuming."""
    remembered: Mapping[int, Mapping[str, Any]]
    """Step → state that the credit of the next step needs from it, as in `Progress`."""

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.state["step"])

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for the user if --load names no checkpoint."""
        load = self.config.run.load
        if load is None or self.checkpoint is not None:
            return ()
        return (f"--load {load}: no checkpoint was saved there; the run starts at step 0",)

    def progress(self) -> Progress:
        """Return the counters of a run that starts here."""
        step = self.step
        return Progress(step, saved=step, whole=step, remembered=dict(self.remembered))


def read_resume_point(config: Config) -> ResumePoint:
    """Read the model's config.json and the state of the checkpoint in --load.

    Raises:
        ValueError, CheckpointError: a file is missing, cannot be read, or does not fit the model.
    """
    hf_dir = config.model.hf_checkpoint
    assert hf_dir is not None  # check_config has refused None
    shape = read_hf_config(hf_dir)
    if config.run.dry_run_hardware is not None:
        find_machine(config.run.dry_run_hardware)
    checkpoint = _chosen_checkpoint(config)
    _check_recording(config, shape)
    state: dict[str, Any] = {"step": 0} if checkpoint is None else load_run_state(checkpoint)
    try:
        spent = Spent.read(state.get("spent", {}))
    except ValueError as error:
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: {error}") from None
    remembered = state.get("remembered", {})
    if not isinstance(remembered, dict):
        raise ValueError(f"--load {checkpoint}: {RUN_STATE}: remembered must be an object")
    return ResumePoint(
        config=with_context(config, shape),
        hf_dir=hf_dir,
        shape=shape,
        checkpoint=checkpoint,
        state=state,
        spent=spent,
        remembered={state["step"]: remembered} if remembered else {},
    )


def with_context(config: Config, shape: ModelShape) -> Config:
    """Return the configuration with --rollout-max-context-len resolved to a number of tokens.

    Raises:
        ValueError: it exceeds the model's context, or leaves no room for a prompt.
    """
    asked = config.rollout.rollout_max_context_len
    limit = shape.max_position_embeddings
    if asked is not None and asked > limit:
        raise ValueError(f"--rollout-max-context-len {asked}: more than the model's context of {limit}")
    context = asked or limit
    if config.rollout.rollout_max_response_len >= context:
        raise ValueError(
            f"--rollout-max-response-len {config.rollout.rollout_max_response_len} leaves no room for a "
            f"prompt in a context of {context}"
        )
    return replace(config, rollout=replace(config.rollout, rollout_max_context_len=context))


def _chosen_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint of --load. None for a new run, for one that died before its first checkpoint and
    left a journal, and for one whose start failed."""
    load = config.run.load
    if load is None:
        return None
    try:
        return find_checkpoint(load)
    except CheckpointError:
        start_failed = (load / CONFIG_FILE).is_file() and not holds_work(load)
        if (load / JOURNAL).is_dir() or start_failed:
            return None
        raise


def _check_recording(config: Config, shape: ModelShape) -> None:
    """Read the first recorded step, so that a wrong directory is noticed before any process starts.

    Raises:
        ValueError: there is no recording, or its token ids are beyond the model's vocabulary.
    """
    if (directory := config.run.load_debug_rollout_data) is None:
        return
    path = min(directory.glob("step_*.json"), default=rollout_path(directory, 1))
    for group in load_groups(path)[1]:
        for response in group.responses:
            if any(not 0 <= number < shape.vocab_size for number in response.token_ids.tolist()):
                raise ValueError(
                    f"recorded rollouts {path}: token ids beyond the model's vocabulary of "
                    f"{shape.vocab_size}; replay with the model of the recording"
                )
