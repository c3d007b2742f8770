"""The kernels against the reference in fp64: `tests/gpu` on a GPU, else a few under Triton's interpreter."""

import os

from job import check
from processes import pass_pytest

QUICK = "auto_chooses or variant_equals or real_vocabulary or offset_beyond or no_memory or head_in_bf16"
ON_CPU = "variant_equals and gspo or inplace or padded"


def run(job):
    arguments, own = ["tests/gpu", *(["-k", QUICK] if job.quick else [])], {}
    if not job.on_gpu:
        arguments, own = ["tests/interpreted/test_kernels.py", "-k", ON_CPU], {"TRITON_INTERPRET": "1"}
    # most of the time goes into compiling
    status = pass_pytest(job, arguments, os.environ | own, packages=["triton"])
    check(status == 0, f"pytest ended with {status}")
