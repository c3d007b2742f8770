"""What of a checkpoint is ours, and which checkpoint is meant. Needs no torch."""

import json
from pathlib import Path
from typing import Any

from megatron_ibpo.weights.errors import CheckpointError

RUN_STATE = "run_state.json"
"""JSON of the training loop, `step` among it; what --load looks for. Weights alone are at step 0."""
LAYOUT = "layout.json"
"""For what layout the checkpoint was written, and whether it holds an optimizer."""
HF_FILES = "hf"
"""Folder with config.json and the tokenizer, so that the checkpoint converts back."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `--load PATH` means: PATH itself, or the newest in PATH or PATH/checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    if (path / RUN_STATE).is_file():
        return path
    if (newest := newest_step(path)) is None:
        raise CheckpointError(f"--load {path}: there is no step_N with a {RUN_STATE} in it")
    return newest


def load_run_state(checkpoint: Path) -> dict[str, Any]:
    """The loop's own part of a checkpoint, `step` included."""
    try:
        return json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / RUN_STATE} cannot be read: {error}") from error


def newest_step(path: Path) -> Path | None:
    """The last step that a training run has saved in `path` or `path`/checkpoints."""
    found = [*path.glob("step_*"), *path.glob("checkpoints/step_*")]
    return max((step for step in found if (step / RUN_STATE).is_file()), key=lambda p: p.name, default=None)
