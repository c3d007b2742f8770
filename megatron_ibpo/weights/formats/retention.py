"""Retention of a run's checkpoints, removal of the others, and how much a run writes."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ibpo.config import Config
from megatron_ibpo.config.run import RunConfig

PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class Keep:
    """A rule for the checkpoints that a run keeps."""

    newest: int
    """Number of latest checkpoints to keep."""
    every: int | None = None
    """Also keep the checkpoints of all steps that are multiples of this."""


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"{PREFIX}{step:06d}"


def partial_of(final: Path) -> Path:
    """Return the directory in which the checkpoint is written before it gets its name. A later run removes
    what a killed one leaves there."""
    return final.with_name(f".{final.name}.partial")


def superseded(steps: Iterable[int], last: int, keep: Keep) -> list[int]:
    """Return the steps whose checkpoints can go once that of step `last` has its name.

    Later ones belong to a run that resumed here before: they are neither counted nor removed.
    """
    present = sorted(step for step in steps if step <= last)
    old = present[: max(0, len(present) - keep.newest)]
    return [step for step in old if keep.every is None or step % keep.every]


def remove_superseded(directory: Path, last: int, keep: Keep) -> None:
    """Remove superseded checkpoints from `directory`. None is ever partly there under its name."""
    directories = {int(path.name.removeprefix(PREFIX)): path for path in _checkpoints(directory)}
    for step in superseded(directories, last, keep):
        renamed = directories[step].with_name(f".{directories[step].name}.removed")
        directories[step].rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed run had begun to write or to remove."""
    for ending in ("partial", "removed"):
        for path in directory.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(directory: Path) -> list[Path]:
    paths = directory.glob(f"{PREFIX}*")
    return [path for path in paths if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]


def checkpoint_bytes(num_parameters: int, *, bf16: bool) -> int:
    """Return the bytes of one Megatron checkpoint: the weights, fp32 master weights if the weights are bf16,
    and Adam's two fp32 moments."""
    weight = 2 if bf16 else 4
    master = 4 if bf16 else 0
    return num_parameters * (weight + master + 8)


def export_bytes(num_parameters: int, *, bf16: bool) -> int:
    """Return the bytes of one Hugging Face export."""
    return num_parameters * (2 if bf16 else 4)


def kept_bytes(config: Config, *, parameters: int, trained: int) -> int:
    """Return the most bytes that a run keeps on disk at one time; 0 if it saves nothing.

    Args:
        config: a precision that is not resolved yet counts as bf16, whose checkpoints are the larger.
        parameters: of the model, which an export holds.
        trained: parameters in a checkpoint: the adapters' with --lora-rank, otherwise the model's.
    """
    if not config.run.save:
        return 0
    bf16 = config.model.bf16 is not False
    checkpoints, exports = kept_at_once(config.run)
    saved = config.algorithm.num_models * checkpoint_bytes(trained, bf16=bf16)
    return checkpoints * saved + exports * export_bytes(parameters, bf16=bf16)


def kept_at_once(run: RunConfig) -> tuple[int, int]:
    """Return the most (Megatron checkpoints, Hugging Face exports) that a run holds at one time: those it
    keeps, and one more that is written before an older one goes."""
    # the number of steps per time interval is not known
    interval = 1 if run.save_interval_minutes is not None else run.save_interval or run.num_rollout
    saves = -(-run.num_rollout // interval)
    forever = run.num_rollout // run.keep_checkpoint_every if run.keep_checkpoint_every else 0
    exports = run.num_rollout // run.export_interval if run.export_interval else 0
    return min(saves, run.keep_checkpoints + 1 + forever), exports + 1
