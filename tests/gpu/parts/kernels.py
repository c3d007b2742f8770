"""The kernels against the reference in fp64: `tests/gpu` on a GPU, else a few under Triton's interpreter."""

import importlib.util
import os

from job import Job, Skipped, check
from processes import run_pytest

QUICK = "auto_chooses or variant_equals or real_vocabulary or offset_beyond or no_memory or head_in_bf16"


def run(job: Job) -> None:
    if importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    arguments, environment = ["tests/gpu"], dict(os.environ)
    if not job.on_gpu:
        environment["TRITON_INTERPRET"] = "1"
        chosen = "variant_equals and gspo or inplace or padded"
        arguments = ["tests/interpreted/test_kernels.py", "-k", chosen]
    elif job.quick:
        arguments += ["-k", QUICK]
    if job.on_gpu and importlib.util.find_spec("xdist") is not None and job.is_large:
        arguments += ["-n", "4", "--dist", "worksteal"]  # most of the time goes into compiling
    counts = run_pytest(arguments, job.scratch, environment)
    job.note(**counts, summary=f"{counts['passed']} tests passed, {counts['failed']} failed")
    check(counts["exit_status"] == 0 and counts["passed"] > 0, f"pytest: {counts}")
