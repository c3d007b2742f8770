"""Logits, loss and gradients beside transformers': `tests/models/test_model_parity.py` on this device."""

import os

from job import check
from processes import pass_pytest


def run(job):
    chosen = ["-k", "bfloat16 or installed" if job.on_gpu else "bfloat16"]
    arguments = ["tests/models/test_model_parity.py", *(chosen if job.quick or not job.on_gpu else [])]
    environment = os.environ | {"IBPO_PARITY_DEVICE": job.device}
    # transformers computes on the CPU
    status = pass_pytest(job, arguments, environment, packages=["transformers", "megatron"])
    check(status == 0, f"pytest ended with {status}")
