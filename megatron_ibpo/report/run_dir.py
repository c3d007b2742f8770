"""The one directory of a run: made, checked and described before work starts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from megatron_ibpo.config import Config, ConfigError, write_config
from megatron_ibpo.versions import installed_versions, warn_on_differences

__all__ = ["METRICS_FILE", "checkpoint_bytes", "prepare_run_dir"]

METRICS_FILE = "metrics.jsonl"
_SPARE_BYTES = 64 * 1024**2
"""For logs, metrics and curves."""


def prepare_run_dir(config: Config, *, checkpoint_bytes: int = 0) -> Path:
    """Make the run's directory and write config.yaml and versions.json into it.

    Args:
        checkpoint_bytes: that the checkpoints kept at one time will take; see `checkpoint_bytes`.

    Raises:
        ConfigError: the directory cannot be made or written, already holds another run, or its disk has too
            little room.
    """
    run_dir = config.run.run_dir
    continues = config.run.load is not None
    if (run_dir / METRICS_FILE).exists() and not continues:
        raise ConfigError(
            f"--run-dir: {run_dir} already holds a run; choose another directory, or continue that run "
            f"with --load {run_dir}"
        )
    probe = run_dir / f".writable.{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--run-dir: {run_dir} cannot be written: {error.strerror}") from error
    needed = (checkpoint_bytes if config.run.save else 0) + _SPARE_BYTES
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise ConfigError(
            f"--run-dir: the disk of {run_dir} has {free / 1024**3:.2f} GiB free, checkpoints and logs need "
            f"{needed / 1024**3:.2f} GiB; free some room, choose another --run-dir, or pass --no-save"
        )
    write_config(config, run_dir / "config.yaml")
    versions = installed_versions()
    warn_on_differences(versions)
    written = json.dumps(versions | {"command": " ".join(sys.argv)}, indent=2)
    (run_dir / "versions.json").write_text(written + "\n", encoding="utf-8")
    return run_dir


def checkpoint_bytes(num_parameters: int, *, bf16: bool) -> int:
    """Bytes of one Megatron checkpoint with optimizer state and one Hugging Face export.

    Megatron: the weights, fp32 master weights where the weights are bf16, and Adam's two fp32 moments.
    """
    weight = 2 if bf16 else 4
    master = 4 if bf16 else 0
    return num_parameters * (weight + master + 8 + weight)
