"""A part of `tests/gpu.sh`: its process, its settings and its report. And other processes that it starts."""

import importlib
import json
import multiprocessing
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

LARGE_BYTES = 64 * 2**30  # a GPU with less memory gets smaller sizes than reports are about
TIMEOUT_S = 60.0  # of a call of another process
KNOWN = {"megatron": "megatron-core"}  # packages without which a part is skipped
KNOWN |= {name: name for name in ("hypothesis", "pytest", "tyro", "msgpack", "matplotlib", "tensorboard")}
one_process = partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))


class Skipped(Exception):
    """This machine lacks what the part needs; the message names it."""


@dataclass
class Job:
    device: str  # cuda or cpu
    quick: bool
    scratch: Path  # a directory of its own, gone when the part ends
    variant: str = ""  # name of one of several cases of the same module
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self):
        return self.device == "cuda"

    @property
    def is_large(self):
        import torch

        return self.on_gpu and torch.cuda.get_device_properties(0).total_memory >= LARGE_BYTES

    def note(self, **numbers):
        self.found |= numbers
        new = self.scratch / "found.new"
        new.write_text(json.dumps(self.found, ensure_ascii=False), encoding="utf-8")
        new.replace(self.scratch / "found.json")


def check(holds, otherwise):
    """The part fails with `otherwise` unless something holds; python -O would drop an assert."""
    if not holds:
        raise AssertionError(otherwise)


def main(module, device, scratch, variant, *quick):
    """Run `parts.<module>.run(job)` and note how it ended."""
    job = Job(device, bool(quick), Path(scratch), variant)
    job.note(status="running")
    try:
        if job.on_gpu and not importlib.import_module("torch").cuda.is_available():
            raise Skipped("torch finds no CUDA device; --device cpu runs the same with tiny shapes")
        if job.on_gpu and job.quick:
            tune_among(2)
        importlib.import_module(f"parts.{module}").run(job)
        job.note(status="passed")
    except Skipped as skipped:
        job.note(status="skipped", reason=str(skipped))
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if package := KNOWN.get((missing or "").partition(".")[0]):
            reason = f"{package} is not installed; WHEELS=DIR gives it (docs/gpu_report.md)"
            return job.note(status="skipped", reason=reason)
        traceback.print_exc()
        job.note(status="failed", reason=f"{type(error).__name__}: {error}"[:1000])
        sys.exit(1)


def tune_among(configurations):
    """Let Triton try few configurations of a kernel: all of a delta net's took over 240 s on an H200."""
    with suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        prune = Autotuner.prune_configs

        def few(self, kwargs):
            found = prune(self, kwargs)
            return found[:: max(1, len(found) // configurations)][:configurations]

        Autotuner.prune_configs = few


def apart(function, *arguments, **named):
    """Call a function in a process of its own, which a trainer needs: it leaves Megatron's groups behind."""
    with one_process() as pool:
        return pool.submit(function, *arguments, **named).result()


@contextmanager
def beside(make):
    """An object that another process makes, and whose methods it calls."""
    with one_process() as pool:
        yield Link(pool, make)


class Link:
    """In the manner of `EngineLink`."""

    def __init__(self, pool, make):
        self._pool, self._make, self._begun = pool, make, []

    def begin(self, method, *arguments):
        self._begun.append(self._pool.submit(_answer, self._make, method, arguments))

    def result(self, timeout=TIMEOUT_S):
        return self._begun.pop(0).result(timeout)

    def ask(self, method, *arguments):
        self.begin(method, *arguments)
        return self.result()


def _answer(make, method, arguments):
    return getattr(_made(make), method)(*arguments)


@cache
def _made(make):
    return make()
