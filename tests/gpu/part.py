"""The process of one part: runs `parts.<name>.run(job)` and notes how it ended."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

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
        check_device(job)
        importlib.import_module(f"parts.{told.name}").run(job)
        job.note(status="passed")
    except Skipped as reason:
        job.note(status="skipped", reason=str(reason))
    except BaseException as error:
        if (package := missing_package(error)) is not None:
            job.note(
                status="skipped",
                reason=f"{package} is not installed; WHEELS=DIR gives it (docs/gpu_report.md)",
            )
            return
        traceback.print_exc()
        job.note(status="failed", reason=f"{type(error).__name__}: {error}"[:1000])
        sys.exit(1)


def missing_package(error: BaseException) -> str | None:
    """Return the package that the machine lacks, if that is why the part ended."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return {"megatron": "megatron-core", "hypothesis": "hypothesis", "pytest": "pytest"}.get(
        (name or "").partition(".")[0]
    )


def check_device(job: Job) -> None:
    if not job.on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        raise Skipped("torch finds no CUDA device; --device cpu runs the same with tiny shapes")


if __name__ == "__main__":
    main()
