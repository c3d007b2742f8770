"""The waits of the host in a trainer's step: torch's operators may read the device and no line says so."""

import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from job import Job, Skipped
from training import set_up, start_policy

import megatron_ibpo

SYNCHRONIZES = "called a synchronizing CUDA operation"
"""Torch's warning (c10/cuda/CUDAFunctions.cpp): not of waits that are asked for, nor of other libraries'."""
OURS = Path(megatron_ibpo.__file__).resolve().parent
INSTALLED = Path(sysconfig.get_paths()["purelib"]).resolve()


def run(job: Job) -> None:
    if not job.on_gpu:
        raise Skipped("torch finds waits on CUDA alone; tests/policy/test_host_reads.py counts reads")
    load, config, sequences = set_up(job, job.variant)
    policy, _ = start_policy(config)
    policy.update(sequences)  # kernels are compiled and state is made in the first step
    with counted() as waits:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            policy.update(sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    rows = [{"place": places[0], "for": places[1], "times": times} for places, times in waits.most_common()]
    own = sum(times for (place, _), times in waits.items() if place.startswith("megatron_ibpo/"))
    said = f"{waits.total()} waits in a step, {own} of them in lines of our own"
    job.note(load=vars(load), waits=rows, own=own, total=waits.total(), summary=said)


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Counts torch's warnings by (the line that waits, or began a backward pass; ours that led there)."""
    found: Counter[tuple[str, str]] = Counter()

    def show(message: Warning | str, *rest: Any, **named: Any) -> None:
        if SYNCHRONIZES in str(message):
            found[_places(sys._getframe(1))] += 1
        else:
            before(message, *rest, **named)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}")
        before: Callable[..., Any] = warnings.showwarning
        warnings.showwarning = show
        yield found


def _places(frame: Any) -> tuple[str, str]:
    """Innermost first; the module `warnings` itself, which calls `show`, is left out."""
    frames = [own for own in traceback.walk_stack(frame) if own[0].f_globals.get("__name__") != "warnings"]
    codes = [(own.f_code, number) for own, number in frames]
    named = [f"{_short(code.co_filename)}:{number} {code.co_name}" for code, number in codes]
    ours = (name for name in named if name.startswith("megatron_ibpo/"))
    return named[0], next(ours, "")


def _short(file: str) -> str:
    path = Path(file).resolve()
    if path.is_relative_to(OURS):
        return str(path.relative_to(OURS.parent))
    return str(path.relative_to(INSTALLED)) if path.is_relative_to(INSTALLED) else path.name
