"""The first code that a trainer's process runs: it sets the environment before a library reads it. The user's
settings stay, but for one that makes it impossible to lend weights to engines. What is for GPUs follows from
the sources of the pinned versions, and has not been run."""

import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.large_imports import uncollected
from megatron_ibpo.config import Config

DEFAULTS = {
    # needed by Megatron's overlap of communication under TP
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # on Hopper flash-linear-attention 0.6.0 lets TileLang compile the delta net's backward pass with nvcc, in
    # the first step, after a rollout was paid for; its Triton kernels are right from Triton 3.7.1 on
    "FLA_TILELANG": "0",
    # torch's compiler would start a process per core in every trainer, for about ten small kernels
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Present and former name of the same settings."""
EXPANDABLE = r"\s*expandable_segments\s*:\s*true\s*(,|$)"
CUDA_WHEELS = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")


def trainer_rank(config: Config, checkpoint: Path | None) -> Any:
    """Return a `rank.TrainerRank`, after setting the environment. Without CUDA the stand-ins come before
    Megatron, which would import torch.compile's machinery for nothing: two seconds."""
    notes = set_environment(
        os.environ, colocate=config.rollout.colocate, in_float32=config.model.bf16 is False
    )
    hide_tilelang()
    hush_megatron()
    with uncollected():
        from megatron_ibpo.policy import cpu

        cpu.activate()
        from megatron_ibpo.policy.rank import TrainerRank

    rank = TrainerRank(config, checkpoint)
    rank.notes = (*notes, *rank.notes)
    return rank


def hide_tilelang() -> None:
    """Hide TileLang, unless it is to be used: flash-linear-attention 0.6.0 would import all of TVM."""
    if os.environ["FLA_TILELANG"] == "0":
        sys.modules.setdefault("tilelang", None)  # type: ignore[arg-type]


def hush_megatron() -> None:
    """Drop warnings of megatron-core and torch's collectives, true and many, on which no user can act."""
    for module in (r"megatron\.", r"torch\.distributed\.", r"torch\.jit\."):
        warnings.filterwarnings("ignore", module=module)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


def set_environment(
    environ: MutableMapping[str, str], *, colocate: bool, in_float32: bool = False, wheels: Path = CUDA_WHEELS
) -> tuple[str, ...]:
    """Set the environment for a trainer's libraries, and return notes for the user.

    Args:
        colocate: engines share the trainer's GPU and open its memory.
        in_float32: the trainer trains in float32.
        wheels: directory of the pinned CUDA packages, if they are installed.
    """
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    if in_float32:  # Transformer Engine multiplies float32 in TF32, whatever torch is told; engines do not
        environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    # Transformer Engine would look under CUDA_HOME and /usr/local/cuda first, which may hold CUDA 12
    for library in ("nvrtc", "curand"):
        if any(wheels.glob(f"lib/lib{library}.so.*")):
            environ.setdefault(f"{library.upper()}_HOME", str(wheels))
    return _without_expandable_segments(environ) if colocate else ()


def _without_expandable_segments(environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Drop expandable segments: such memory is lent as file descriptors, which containers often forbid."""
    notes = []
    for name in ALLOCATOR:
        settings = environ.get(name, "")
        allowed = re.sub(EXPANDABLE, "", settings, flags=re.IGNORECASE).strip(", ")
        if allowed == settings.strip(", "):
            continue
        if allowed:
            environ[name] = allowed
        else:
            del environ[name]
        notes.append(
            f"{name}: trainers run without expandable_segments, since engines that share their GPUs "
            "(--colocate) often cannot open such memory"
        )
    return tuple(notes)
