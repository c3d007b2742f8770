"""The process of one part: runs `parts.<name>.run(job)` and notes how it ended."""

import argparse
import importlib
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from job import Job, Skipped

KNOWN = {"megatron": "megatron-core"}  # packages without which a part is skipped
KNOWN |= {name: name for name in ("hypothesis", "pytest", "tyro", "msgpack", "matplotlib", "tensorboard")}


def main():
    parser = argparse.ArgumentParser()
    for words in (["name"], ["--variant"], ["--device"]):
        parser.add_argument(*words)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path)
    told = parser.parse_args()
    job = Job(told.device, told.quick, told.scratch, told.variant)
    job.note(status="running")
    try:
        if job.on_gpu and not importlib.import_module("torch").cuda.is_available():
            raise Skipped("torch finds no CUDA device; --device cpu runs the same with tiny shapes")
        if job.on_gpu and job.quick:
            tune_among(2)
        importlib.import_module(f"parts.{told.name}").run(job)
        job.note(status="passed")
    except Skipped as skipped:
        job.note(status="skipped", reason=str(skipped))
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if package := KNOWN.get((missing or "").partition(".")[0]):
            reason = f"{package} is not installed; WHEELS=DIR gives it (docs/gpu_report.md)"
            job.note(status="skipped", reason=reason)
            return
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


if __name__ == "__main__":
    main()
