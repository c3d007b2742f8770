"""Logits, loss and gradients beside transformers': `tests/models/test_model_parity.py` on this device."""

import importlib.util
import os

from job import Job, Skipped, check
from processes import run_pytest


def run(job: Job) -> None:
    for module in ("transformers", "megatron"):
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"{module} is not installed")
    arguments = ["tests/models/test_model_parity.py"]
    if not job.on_gpu:
        arguments += ["-k", "bfloat16"]
    elif job.quick:
        arguments += ["-k", "bfloat16 or installed"]
    if job.is_large and importlib.util.find_spec("xdist") is not None:
        arguments += ["-n", "4", "--dist", "worksteal"]  # transformers computes on the CPU
    counts = run_pytest(arguments, job.scratch, {**os.environ, "IBPO_PARITY_DEVICE": job.device})
    job.note(**counts, summary=f"{counts['passed']} tests passed, {counts['failed']} failed")
    check(counts["exit_status"] == 0 and counts["passed"] > 0, f"pytest: {counts}")
