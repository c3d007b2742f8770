"""Launches every kernel with every loss variant up to compiling: only so are arguments bound as on a GPU."""

import os
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import megatron_ibpo.kernels.row_logprobs
import megatron_ibpo.kernels.row_statistics
import megatron_ibpo.kernels.segment_loss
import megatron_ibpo.kernels.set_rows  # noqa: F401  here, before TRITON_INTERPRET is set
from megatron_ibpo.loss import VARIANTS
from support.kernel_cases import make_batch, options_for, restricted, run


def launch_everything() -> int:
    """Launch the loss of every variant, forward and backward, and return how many signatures there were."""
    bound: set[tuple[str, str]] = set()
    h100 = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: h100, get_current_device=lambda: 0, get_current_stream=lambda _: 0
    ))  # fmt: skip
    # where it returns nothing, nothing is launched
    JITFunction._do_compile = lambda kernel, key, *_, **__: bound.add((kernel.__name__, key))
    # the kernels write nothing: NaN, unlike whatever memory holds, passes as a log-prob
    torch.use_deterministic_algorithms(True)
    # the kernels are there already: this only lets the loss take CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"
    batch = make_batch("cpu")
    old = batch["old_logprobs_N"]
    for variant in VARIANTS:
        options = {**options_for(variant), "backend": "triton"}
        run(batch, **options)
        weights = {
            "token_weights_N": torch.ones_like(old),
            "temperature": torch.ones(len(batch["advantages"])),
        }
        run(batch, torch.bfloat16, **options, **weights, inplace=True, kl_coef=0.1, ref_logprobs_N=old)
    for dtype in (torch.float32, torch.bfloat16):
        run(restricted("cpu"), dtype, backend="triton")
    return len(bound)


if __name__ == "__main__":
    print(launch_everything())
