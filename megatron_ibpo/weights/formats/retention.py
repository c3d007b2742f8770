"""Retention of a run's checkpoints, and removal of the others."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    before = sorted(step for step in steps if step <= last)
    old = before[: max(0, len(before) - keep.newest)]
    return [step for step in old if keep.every is None or step % keep.every]


def remove_superseded(directory: Path, last: int, keep: Keep) -> None:
    """Remove superseded checkpoints from `directory`. None is ever partly there under its name."""
    found = {int(path.name.removeprefix(PREFIX)): path for path in _checkpoints(directory)}
    for step in superseded(found, last, keep):
        gone = found[step].with_name(f".{found[step].name}.removed")
        found[step].rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed run had begun to write or to remove."""
    for ending in ("partial", "removed"):
        for path in directory.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(directory: Path) -> list[Path]:
    found = directory.glob(f"{PREFIX}*")
    return [path for path in found if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]
