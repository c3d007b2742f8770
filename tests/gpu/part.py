"""The process of one part: runs `parts.<name>.run(job)` and notes how it ended."""

import argparse
import importlib
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from job import Job, Skipped


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--variant", default="")
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
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
        if (package := missing_package(error)) is not None:
            reason = f"{package} is not installed; WHEELS=DIR gives it (docs/gpu_report.md)"
            job.note(status="skipped", reason=reason)
            return
        traceback.print_exc()
        job.note(status="failed", reason=f"{type(error).__name__}: {error}"[:1000])
        sys.exit(1)


def missing_package(error: BaseException) -> str | None:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    known = {"megatron": "megatron-core"}
    known |= {name: name for name in ("hypothesis", "pytest", "tyro", "msgpack", "matplotlib", "tensorboard")}
    return known.get((name or "").partition(".")[0])


def tune_among(configurations: int) -> None:
    """Let Triton try few configurations of a kernel: all of a delta net's took over 240 s on an H200."""
    with suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        prune = Autotuner.prune_configs

        def few(self: Autotuner, kwargs: dict[str, Any]) -> list[Any]:
            found = prune(self, kwargs)
            return found[:: max(1, len(found) // configurations)][:configurations]

        Autotuner.prune_configs = few


if __name__ == "__main__":
    main()
