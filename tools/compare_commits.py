"""Compare the training of two commits on this machine, bit for bit.

    python tools/compare_commits.py v1.0                      # v1.0 and the working tree
    python tools/compare_commits.py main my-branch --algorithms ibpo --layouts dense

Both train on the same recorded rollouts, those of the working tree's `tests/golden`, each with its own code
and its own way of starting trainers. After every step loss and gradient norm are compared exactly, all
weights by their SHA-256. The exit status is 0 if all are equal, 1 if some differ, 2 if a commit cannot be
run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from megatron_ibpo.basics.entry_point import run_tool

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.golden_runs import LAYOUTS, train_recorded, weights  # noqa: E402

EQUAL, DIFFERENT = 0, 1  # and BAD_INPUT if they cannot be compared
SHOWN_DIGITS = 12


@dataclass
class Arguments:
    old: tyro.conf.Positional[str]
    """First commit, as git names it."""
    new: tyro.conf.Positional[str | None] = None
    """Second commit; None: the working tree."""
    layouts: tuple[Literal["dense", "dense-dp2", "next-tp2-ep2"], ...] = (
        "dense",
        "dense-dp2",
        "next-tp2-ep2",
    )
    """Models and their layouts over trainers."""
    algorithms: tuple[Literal["ibpo", "ibpo-mask", "gspo", "dapo", "ppo", "ibpo scheduled"], ...] = (
        "ibpo",
        "ibpo-mask",
        "gspo",
        "dapo",
        "ppo",
        "ibpo scheduled",
    )
    """Presets, with further settings of a case."""


@dataclass(frozen=True)
class Step:
    """The results of a step."""

    loss: float
    grad_norm: float
    sha256: str
    """Hash of the names, shapes and bytes of all weights after it."""


@contextmanager
def checked_out(commit: str | None) -> Iterator[Path]:
    """Yield a directory with the commit and its C++ extension built; the working tree for None."""
    if commit is None:
        _build(ROOT)
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        _call(["git", "worktree", "add", "--detach", str(tree), commit], ROOT)
        try:
            _build(tree)
            yield tree
        finally:
            _call(["git", "worktree", "remove", "--force", str(tree)], ROOT)


def _build(tree: Path) -> None:
    _call(["bash", "tools/bootstrap.sh"], tree, IBPO_PYTHON=sys.executable)


def _call(command: list[str], directory: Path, **environment: str) -> None:
    done = subprocess.run(
        command, cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command)} in {directory}: {done.stderr.strip()}")


def trained(repository: Path, layout: str, algorithm: str) -> list[Step]:
    """Return the results of the repository's code on the recorded rollouts, step by step."""
    with tempfile.TemporaryDirectory() as directory:
        run = train_recorded(repository, LAYOUTS[layout], algorithm, Path(directory))
        return [
            Step(row["loss"], row["grad_norm"], digest(checkpoint))
            for row, checkpoint in zip(run.rows, run.checkpoints, strict=True)
        ]


def digest(checkpoint: Path) -> str:
    """Return the SHA-256 of all weights."""
    checksum = hashlib.sha256()
    for name, tensor in sorted(weights(checkpoint).items()):
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        checksum.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def compare(old: Path, new: Path, arguments: Arguments) -> bool:
    """Train both, print a line for each step, and return whether all steps are equal."""
    equal = True
    print(f"{'layout':<13} {'algorithm':<10} step {'loss':>22} {'gradient norm':>22} weights")
    for layout in arguments.layouts:
        for algorithm in arguments.algorithms:
            steps = [trained(repository, layout, algorithm) for repository in (old, new)]
            for number, (old_step, new_step) in enumerate(zip(*steps, strict=True), start=1):
                for step, mark in (
                    [(old_step, "")] if old_step == new_step else [(old_step, "old"), (new_step, "new")]
                ):
                    print(
                        f"{layout:<13} {algorithm:<10} {number:>4} {step.loss:>22} {step.grad_norm:>22} "
                        f"{step.sha256[:SHOWN_DIGITS]} {mark or 'equal'}",
                        flush=True,
                    )
                equal &= old_step == new_step
    return equal


def main(arguments: Arguments) -> int:
    with checked_out(arguments.old) as old, checked_out(arguments.new) as new:
        equal = compare(old, new, arguments)
    print("equal bit for bit" if equal else "NOT equal")
    return EQUAL if equal else DIFFERENT


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
