"""A run's checkpoints: this project's own files in them, the search for the one that a path means, which of
them stay, and how much a run writes. Needs no torch."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import KIB, read_json_file, read_user_file
from megatron_ibpo.config import Config
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.weights import CheckpointError

RUN_STATE = "run_state.json"
"""JSON with the state of the training loop, including `step`; --load looks for it. Weights alone are at step
0."""
LAYOUT = "layout.json"
"""File with the layout that the checkpoint was written for, and whether it holds an optimizer."""
METADATA, CONFIG = ".metadata", "metadata.json"
"""Files that every distributed checkpoint of Megatron's has."""
HF_FILES = "hf"
"""Folder with config.json and the tokenizer, so that the checkpoint converts back."""


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `--load PATH` means: PATH itself, or the newest in PATH or PATH/checkpoints.
    Raises CheckpointError if there is none."""
    if (path / RUN_STATE).is_file():
        return path
    if (newest := newest_step(path)) is None:
        raise CheckpointError(
            f"--load {path}: neither a run nor a checkpoint; there is no step_N with a {RUN_STATE} in it"
        )
    return newest


def find_stored(path: Path) -> Path:
    """Return the checkpoint directory that `path` means: itself, the newest step of a training run, or the
    one that Megatron-LM's tracker file names. Raises CheckpointError if there is no such directory."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    if (path / CONFIG).is_file():
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return newest_step(path) or path
    latest = read_user_file(tracker, KIB).decode(errors="replace").strip()
    if not (latest.isdecimal() or latest == "release"):
        raise CheckpointError(f"{tracker} must hold the number of an iteration, it holds {latest[:40]!r}")
    return path / (latest if latest == "release" else f"iter_{int(latest):07}")


def load_run_state(checkpoint: Path) -> dict[str, Any]:
    """Return the loop's own part of a checkpoint, `step` included. Raises CheckpointError if the file is
    missing or malformed."""
    path = checkpoint / RUN_STATE
    with _naming(path):
        state = _object(path)
        if not _is_count(step := state.get("step")):
            raise ValueError(f"step must be a whole number of at least 0, is {shown(step)}")
    return state


def read_layout(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `layout.json`; empty for checkpoints without one. Raises CheckpointError if the
    file is malformed."""
    path = checkpoint / LAYOUT
    if not path.exists():
        return {}
    with _naming(path):
        layout = _object(path)
        _check_layout(layout)
    return layout


def _check_layout(layout: dict[str, Any]) -> None:
    parallel = layout.get("parallel")
    if not isinstance(parallel, dict):
        raise ValueError(f"parallel must be an object, is {shown(parallel)}")
    sizes = {name for name in parallel if name.endswith("_parallel_size")}
    sizes |= {f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")}
    numbers = {f"parallel.{name[:60]}": parallel.get(name) for name in sizes}
    numbers["virtual_stages"] = layout.get("virtual_stages", 1)
    sharded = parallel.get("use_distributed_optimizer")
    flags = {"optimizer": layout.get("optimizer"), "parallel.use_distributed_optimizer": sharded}
    for name, value in numbers.items():
        if not _is_count(value):
            raise ValueError(f"{name} must be a whole number, is {shown(value)}")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, is {shown(value)}")


def _object(path: Path) -> dict[str, Any]:
    content = read_json_file(path)
    if not isinstance(content, dict):
        raise ValueError(f"must hold an object, holds a {type(content).__name__}")
    return content


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors within the context into a CheckpointError that names the file."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; take another copy of the checkpoint, or an earlier one"
        ) from error


def newest_step(path: Path) -> Path | None:
    """Return the last step that a training run has saved in `path` or `path`/checkpoints."""
    steps = [*path.glob(f"{PREFIX}*"), *path.glob(f"checkpoints/{PREFIX}*")]
    return max((step for step in steps if (step / RUN_STATE).is_file()), key=lambda p: p.name, default=None)


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
    """Return the steps whose checkpoints can go once that of step `last` has its name. Later ones belong to a
    run that resumed here before: they are neither counted nor removed."""
    present = sorted(step for step in steps if step <= last)
    old = present[: max(0, len(present) - keep.newest)]
    return [step for step in old if keep.every is None or step % keep.every]


def remove_superseded(directory: Path, last: int, keep: Keep) -> None:
    """Remove superseded checkpoints from `directory`. None is ever partly there under its name."""
    directories = {
        int(number): path
        for path in directory.glob(f"{PREFIX}*")
        if path.is_dir() and (number := path.name.removeprefix(PREFIX)).isdigit()
    }
    for step in superseded(directories, last, keep):
        renamed = directories[step].with_name(f".{directories[step].name}.removed")
        directories[step].rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed run had begun to write or to remove."""
    for ending in ("partial", "removed"):
        for path in directory.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


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
