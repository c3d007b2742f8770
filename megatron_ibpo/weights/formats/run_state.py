"""This project's own files in a checkpoint, and the search for the checkpoint that a path means. Needs no
torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import KIB, read_json_file, read_user_file
from megatron_ibpo.weights.weight_errors import CheckpointError

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

    Raises:
        CheckpointError: there is none.
    """
    if (path / RUN_STATE).is_file():
        return path
    if (newest := newest_step(path)) is None:
        raise CheckpointError(
            f"--load {path}: neither a run nor a checkpoint; there is no step_N with a {RUN_STATE} in it"
        )
    return newest


def find_stored(path: Path) -> Path:
    """Return the checkpoint directory that `path` means: itself, the newest step of a training run, or the
    one that Megatron-LM's tracker file names.

    Raises:
        CheckpointError: there is no such directory.
    """
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
    """Return the loop's own part of a checkpoint, `step` included.

    Raises:
        CheckpointError: the file is missing or malformed.
    """
    path = checkpoint / RUN_STATE
    with _naming(path):
        state = _object(path)
        if not _is_count(step := state.get("step")):
            raise ValueError(f"step must be a whole number of at least 0, is {shown(step)}")
    return state


def read_layout(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `layout.json`; empty for checkpoints without one.

    Raises:
        CheckpointError: the file is malformed.
    """
    path = checkpoint / LAYOUT
    if not path.exists():
        return {}
    with _naming(path):
        layout = _object(path)
        _check_layout(layout)
    return layout


def _check_layout(layout: dict[str, Any]) -> None:
    if not isinstance(layout.get("optimizer"), bool):
        raise ValueError(f"optimizer must be true or false, is {shown(layout.get('optimizer'))}")
    if not _is_count(layout.get("virtual_stages", 1)):
        raise ValueError(f"virtual_stages must be a whole number, is {shown(layout['virtual_stages'])}")
    parallel = layout.get("parallel")
    if not isinstance(parallel, dict):
        raise ValueError(f"parallel must be an object, is {shown(parallel)}")
    sizes = {name for name in parallel if name.endswith("_parallel_size")}
    for name in sizes | {f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")}:
        if not _is_count(parallel.get(name)):
            raise ValueError(f"parallel.{name[:60]} must be a whole number, is {shown(parallel.get(name))}")
    sharded = parallel.get("use_distributed_optimizer")
    if not isinstance(sharded, bool):
        raise ValueError(f"parallel.use_distributed_optimizer must be true or false, is {shown(sharded)}")


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
    steps = [*path.glob("step_*"), *path.glob("checkpoints/step_*")]
    return max((step for step in steps if (step / RUN_STATE).is_file()), key=lambda p: p.name, default=None)
