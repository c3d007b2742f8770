"""Retention of a run's checkpoints, and the removal of those that do not stay."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PREFIX = "step_"


@dataclass(frozen=True, slots=True)
class Keep:
    """A rule for the checkpoints that a run keeps."""

    newest: int
    """This many of the last ones."""
    every: int | None = None
    """And those of all steps that are multiples of this."""


def step_name(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"{PREFIX}{step:06d}"


def partial_of(final: Path) -> Path:
    """Return the directory in which it is written before it has its name. A later run removes what a killed
    one leaves there."""
    return final.with_name(f".{final.name}.partial")


def superseded(steps: Iterable[int], last: int, keep: Keep) -> list[int]:
    """The steps whose checkpoints go once that of step `last` has its name.

    Later ones belong to a run that went on from here before: they are neither counted nor removed.
    """
    before = sorted(step for step in steps if step <= last)
    old = before[: max(0, len(before) - keep.newest)]
    return [step for step in old if keep.every is None or step % keep.every]


def remove_superseded(directory: Path, last: int, keep: Keep) -> None:
    """Remove them from `directory`. None is ever there in part under its name."""
    found = {int(path.name.removeprefix(PREFIX)): path for path in _checkpoints(directory)}
    for step in superseded(found, last, keep):
        gone = found[step].with_name(f".{found[step].name}.removed")
        found[step].rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what a run that was killed had begun to write or to remove."""
    for ending in ("partial", "removed"):
        for path in directory.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(directory: Path) -> list[Path]:
    found = directory.glob(f"{PREFIX}*")
    return [path for path in found if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()]
