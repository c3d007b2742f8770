"""Defaults that depend on the device, decided once it is known."""

from dataclasses import replace
from typing import Literal

from megatron_ibpo.config.fields import Config


def on_device(config: Config, *, on_gpu: bool, has_delta_nets: bool) -> Config:
    """Return the configuration with nothing left to the device.

    Args:
        on_gpu: whether the trainers have GPUs; a plan assumes that they will.
        has_delta_nets: whether layers of the model are recurrent (`ModelShape.is_recurrent`).
    """
    bf16 = on_gpu if config.model.bf16 is None else config.model.bf16
    dtype = engine_dtype(config.rollout.vllm_dtype, on_gpu=on_gpu, bf16=bf16, has_delta_nets=has_delta_nets)
    return replace(
        config,
        model=replace(config.model, bf16=bf16),
        rollout=replace(config.rollout, vllm_dtype=dtype),
    )


def engine_dtype(
    asked: Literal["auto", "bfloat16", "float32"], *, on_gpu: bool, bf16: bool, has_delta_nets: bool
) -> Literal["bfloat16", "float32"]:
    """Return the precision that engines sample in.

    "auto" is the trainer's on GPUs. On CPUs it is float32, but bfloat16 for models with delta nets: vLLM's
    CPU kernels for those take nothing else.
    """
    if asked != "auto":
        return asked
    return "bfloat16" if (bf16 if on_gpu else has_delta_nets) else "float32"
