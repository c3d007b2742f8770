"""Megatron distributed checkpoints of policy and critic, optimizers and schedules: atomic, of any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state

from megatron_ibpo.policy.critic import Critic
from megatron_ibpo.policy.trainer import Trainer

__all__ = ["CheckpointError", "find_checkpoint", "load_checkpoint", "load_run_state", "save_checkpoint"]

_STATE_FILE = "run_state.json"
_CRITIC = "critic"
"""Directory in a checkpoint: tensors of both models have the same names."""


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, or not of this model."""


def save_checkpoint(
    trainer: Trainer,
    directory: Path,
    step: int,
    run_state: dict[str, Any],
    critic: Critic | None = None,
) -> Path:
    """Write `directory`/step_N and return it. It appears under that name only when it is whole.

    Args:
        run_state: JSON of the loop's own; comes back from `load_checkpoint`.
    """
    final = directory / f"step_{step:06d}"
    partial = directory / f".{final.name}.partial"

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _CRITIC if critic is not None else partial).mkdir(parents=True)

    trainer.world.on_driver(prepare)
    dist_checkpointing.save(_state(trainer, is_loading=False), str(partial))
    if critic is not None:
        dist_checkpointing.save(_state(critic, is_loading=False), str(partial / _CRITIC))
    trainer.world.barrier()

    def publish() -> None:
        (partial / _STATE_FILE).write_text(json.dumps({"step": step, **run_state}), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    trainer.world.on_driver(publish)
    return final


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `--load PATH` means: PATH itself, or the newest in PATH or PATH/checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    if (path / _STATE_FILE).is_file():
        return path
    found = [*path.glob("step_*"), *path.glob("checkpoints/step_*")]
    whole = sorted((p for p in found if (p / _STATE_FILE).is_file()), key=lambda p: p.name)
    if not whole:
        raise CheckpointError(f"--load {path}: there is no step_N with a {_STATE_FILE} in it")
    return whole[-1]


def load_run_state(checkpoint: Path) -> dict[str, Any]:
    """The loop's own part of a checkpoint, `step` included."""
    try:
        return json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / _STATE_FILE} cannot be read: {error}") from error


def load_checkpoint(trainer: Trainer, checkpoint: Path, critic: Critic | None = None) -> None:
    """Restore weights, optimizer state and schedule.

    Raises:
        CheckpointError: the checkpoint is damaged, holds another model, or no critic where there is one.
    """
    if critic is not None and not (checkpoint / _CRITIC).is_dir():
        raise CheckpointError(f"--load {checkpoint}: holds no critic, so it is no run of --advantages critic")
    _load(trainer, checkpoint)
    if critic is not None:
        _load(critic, checkpoint / _CRITIC)


def _load(model: Trainer | Critic, checkpoint: Path) -> None:
    try:
        state = dist_checkpointing.load(_state(model, is_loading=True), str(checkpoint))
    except Exception as error:
        raise CheckpointError(
            f"--load {checkpoint}: cannot be loaded into this model: {type(error).__name__}: {error}"
        ) from error
    for index, chunk in enumerate(model.chunks):
        chunk.module.load_state_dict(state[f"model{index}"])
    model.optimizer.load_state_dict(state["optimizer"])
    model.scheduler.load_state_dict(state["scheduler"])


def _state(trained: Trainer | Critic, *, is_loading: bool) -> dict[str, Any]:
    # one optimizer for dense and expert parameters each: without the flag their keys depend on EP
    metadata = {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        f"model{index}": chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(trained.chunks)
    }
    optimizer = trained.optimizer.sharded_state_dict(
        {key: value for model in models.values() for key, value in model.items()},
        is_loading=is_loading,
        metadata=metadata,
    )
    return {**models, "optimizer": optimizer, "scheduler": trained.scheduler.state_dict()}
