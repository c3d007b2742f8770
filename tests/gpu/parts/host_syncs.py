"""The waits of the host in a trainer's step: torch's operators may read the device and no line says so."""

import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from job import Skipped
from training import set_up, start_policy

import megatron_ibpo

SYNCHRONIZES = "called a synchronizing CUDA operation"
"""Torch's warning (c10/cuda/CUDAFunctions.cpp): not of waits that are asked for, nor of other libraries'."""
OURS = Path(megatron_ibpo.__file__).resolve().parent
INSTALLED = Path(sysconfig.get_paths()["purelib"]).resolve()


def run(job):
    if not job.on_gpu:
        raise Skipped("torch finds waits on CUDA alone; tests/policy/test_residence.py counts reads")
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
def counted():
    """Counts torch's warnings by (the line that waits, or began a backward pass; ours that led there)."""
    found = Counter()

    def show(message, *rest, **named):
        if SYNCHRONIZES not in str(message):
            return before(message, *rest, **named)
        frames = traceback.walk_stack(sys._getframe(1))  # innermost first; of `warnings`, which calls this
        codes = [(f.f_code, line) for f, line in frames if f.f_globals.get("__name__") != "warnings"]
        lines = [f"{short(code.co_filename)}:{line} {code.co_name}" for code, line in codes]
        ours = (line for line in lines if line.startswith("megatron_ibpo/"))
        found[lines[0], next(ours, "")] += 1
        return None

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}")
        before, warnings.showwarning = warnings.showwarning, show
        yield found


def short(file):
    path = Path(file).resolve()
    if path.is_relative_to(OURS):
        return str(path.relative_to(OURS.parent))
    return str(path.relative_to(INSTALLED)) if path.is_relative_to(INSTALLED) else path.name
