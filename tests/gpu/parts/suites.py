"""Tests of this repository on this device: parity, and the kernels, under compute-sanitizer too."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from job import Skipped, check

QUICK = "auto_chooses or variant_equals or real_vocabulary or offset_beyond or no_memory or head_in_bf16"
ON_CPU = "variant_equals and gspo or written_over or padded"
SANITIZED = f"{ON_CPU} or several_blocks or peak_comes_late"
KERNELS = (
    "logits_gradient_kernel", "row_statistics_kernel", "combine_kernel", "segment_sums_kernel",
    "sequence_loss_kernel", "token_coefficients_kernel",
)  # fmt: skip
ERRORS = 86  # exit status of compute-sanitizer where it found any
TESTS = Path(__file__).resolve().parents[2]


def run(job):
    on_gpu, own, needs = job.on_gpu, {}, ["triton"]
    if job.variant == "parity":
        file, chosen = "models/test_model_parity.py", "bfloat16 or installed" if on_gpu else "bfloat16"
        own, needs = {"IBPO_PARITY_DEVICE": job.device}, ["transformers", "megatron"]
    elif job.variant != "kernels":
        return sanitize(job)
    elif on_gpu:
        file, chosen = "gpu", QUICK
    else:  # a few under Triton's interpreter
        file, chosen, own = "interpreted/test_kernels.py", ON_CPU, {"TRITON_INTERPRET": "1"}
    status = run_pytest(job, file, "" if on_gpu and not job.quick else chosen, own, needs)
    return check(status == 0, f"pytest ended with {status}")


def sanitize(job):
    if not job.on_gpu:
        raise Skipped("compute-sanitizer needs a CUDA device")
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise Skipped("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    log = job.scratch / "sanitizer.log"
    command = [program, "--tool", job.variant, "--error-exitcode", str(ERRORS), "--launch-timeout", "120"]
    command += ["--target-processes", "all", "--log-file", str(log)]
    if job.variant == "initcheck":  # it must see every kernel that writes, and so judges torch's reads, too
        command += ["--print-limit", "1000000", "--show-backtrace", "no"]
    else:
        command += [word for name in KERNELS for word in ("--kernel-name", f"kns={name}")]
    # memory that torch keeps for reuse would hide what lies beyond a tensor's end
    own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        status = run_pytest(job, "gpu", SANITIZED, own, [], command)
    finally:
        said = log.read_text(errors="replace") if log.exists() else ""
        print(said[-4000:])
        last = said.strip().rpartition("\n")[2].removeprefix("=========").strip()
        job.note(sanitizer=said[-2000:], summary=f"{job.found.get('passed', 0)} tests, {last}")
    if job.variant != "initcheck" or status != ERRORS:
        return check(status == 0, f"it ended with {status}; {last}")
    # fails if a kernel of ours read what nobody wrote; torch's may, where a mask drops the value
    found = re.findall(r"Uninitialized .*\n=+\s+at (.+)", said)
    readers = Counter(name.partition("+")[0][:120] for name in found)
    job.note(readers=readers, summary=f"{len(found)} reads, all by torch's own kernels; {last}")
    check(bool(readers), f"no error names a kernel; {last}")
    ours = [name for name in readers if any(kernel in name for kernel in KERNELS)]
    return check(not ours, f"memory that nobody wrote is read by {', '.join(ours)}")


def run_pytest(job, file, chosen, own, needs, prefix=()):
    """Note how many tests passed, failed and were skipped, what failed and why; return the exit status."""
    for module in ("pytest", "hypothesis", *needs):
        if importlib.util.find_spec(module) is None:
            raise Skipped(f"{module} is not installed")
    results = job.scratch / "junit.xml"
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    command += [f"--junitxml={results}", f"tests/{file}", "-k", chosen]
    if not prefix and job.is_large and importlib.util.find_spec("xdist") is not None:
        command += ["-n", "4", "--dist", "worksteal"]  # most of the time goes into compiling, or into the CPU
    where = {"cwd": TESTS.parent, "env": os.environ | own}
    status = subprocess.run(command, **where, stdin=subprocess.DEVNULL).returncode
    counts = {"exit_status": status, "passed": 0, "failed": 0, "skipped": 0, "failures": {}}
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        bad = [child for child in case if child.tag in ("failure", "error")]
        counts["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
        if bad:
            counts["failures"][case.get("name")] = (bad[0].get("message") or "")[:300]
    job.note(**counts, summary=f"{counts['passed']} tests passed, {counts['failed']} failed")
    check(counts["passed"] > 0 and not counts["failures"], f"pytest: {counts}")
    return status
