"""Launches every kernel with every loss variant, up to compiling."""

import os
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import megatron_ibpo.kernels.logits_gradient
import megatron_ibpo.kernels.row_statistics
import megatron_ibpo.kernels.segment_loss  # noqa: F401  here, before TRITON_INTERPRET is set
from megatron_ibpo.loss import VARIANTS
from support.kernel_cases import make_batch, options_for, run


class NoDevice:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def launch_everything() -> int:
    bound: set[tuple[str, str]] = set()
    driver.set_active(NoDevice())

    def count(kernel: Any, key: str, *_: Any, **__: Any) -> None:
        bound.add((kernel.__name__, key))

    JITFunction._do_compile = count  # where it returns nothing, nothing is launched
    # the kernels write nothing: NaN, unlike whatever memory holds, passes as a log-prob
    torch.use_deterministic_algorithms(True)
    # the kernels are there already: this only lets the loss take CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"
    batch = make_batch("cpu")
    for variant in VARIANTS:
        options = {**options_for(variant), "backend": "triton"}
        run(batch, **options)
        run(
            batch, torch.bfloat16, **options, inplace=True, kl_coef=0.1,
            ref_logprobs_N=batch["old_logprobs_N"],
            token_weights_N=torch.ones_like(batch["old_logprobs_N"]),
            temperature=torch.ones(len(batch["advantages"])),
        )  # fmt: skip
    return len(bound)


if __name__ == "__main__":
    print(launch_everything())
