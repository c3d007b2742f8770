"""Defaults that depend on the device, resolved once the device is known."""

from dataclasses import replace
from typing import Literal

from megatron_ibpo.config.config import Config
from megatron_ibpo.config.ranges import named_values


def on_device(config: Config, *, on_gpu: bool, has_delta_nets: bool) -> Config:
    """Return the configuration with every device-dependent default resolved.

    Args:
        on_gpu: whether the trainers have GPUs; a plan assumes that they will.
        has_delta_nets: whether the model has recurrent layers (`ModelShape.is_recurrent`).
    """
    bf16 = on_gpu if config.model.bf16 is None else config.model.bf16
    dtype = engine_dtype(
        config.rollout.vllm_dtype,
        on_gpu=on_gpu,
        bf16=bf16,
        has_delta_nets=has_delta_nets,
        is_quantized="quantization" in named_values(config.rollout.vllm_arg),
    )
    return replace(
        config,
        model=replace(config.model, bf16=bf16),
        rollout=replace(config.rollout, vllm_dtype=dtype),
    )


def engine_dtype(
    asked: Literal["auto", "bfloat16", "float32"],
    *,
    on_gpu: bool,
    bf16: bool,
    has_delta_nets: bool,
    is_quantized: bool,
) -> Literal["bfloat16", "float32"]:
    """Return the precision for sampling.

    "auto" is the trainer's on GPUs and float32 on CPUs, but bfloat16 where vLLM does not support float32:
    with quantized weights, and on CPUs with delta nets.
    """
    if asked != "auto":
        return asked
    return "bfloat16" if is_quantized or (bf16 if on_gpu else has_delta_nets) else "float32"
