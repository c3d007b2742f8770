"""The kernels under one tool of NVIDIA's compute-sanitizer."""

import os
import re
import shutil
from collections import Counter

from job import Skipped, check
from processes import pass_pytest

KERNELS = (
    "logits_gradient_kernel", "row_statistics_kernel", "combine_kernel", "segment_sums_kernel",
    "sequence_loss_kernel", "token_coefficients_kernel",
)  # fmt: skip
ERRORS = 86  # exit status of compute-sanitizer where it found any
READER = r"Uninitialized .*\n=+\s+at (.+)"
CASES = "variant_equals and gspo or several_blocks or peak_comes_late or padded or inplace"


def run(job):
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
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        status = pass_pytest(job, ["tests/gpu", "-k", CASES], environment, prefix=command, workers=0)
    finally:
        said = log.read_text(errors="replace") if log.exists() else ""
        print(said[-4000:])
        last = said.strip().rpartition("\n")[2].removeprefix("=========").strip()
        job.note(sanitizer=said[-2000:], summary=f"{job.found.get('passed', 0)} tests, {last}")
    if job.variant != "initcheck" or status != ERRORS:
        check(status == 0, f"it ended with {status}; {last}")
        return
    # fails if a kernel of ours read what nobody wrote; torch's may, where a mask drops the value
    readers = Counter(name.partition("+")[0][:120] for name in re.findall(READER, said))
    job.note(readers=readers)
    check(bool(readers), f"no error names a kernel; {last}")
    ours = [name for name in readers if any(kernel in name for kernel in KERNELS)]
    check(not ours, f"memory that nobody wrote is read by {', '.join(ours)}")
    job.note(summary=f"{readers.total()} reads, all by torch's own kernels; {last}")
