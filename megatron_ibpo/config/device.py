"""Defaults that depend on the device, decided once it is known."""

from dataclasses import replace

from megatron_ibpo.config.fields import Config


def on_device(config: Config, *, on_gpu: bool) -> Config:
    """The configuration with nothing left to the device.

    Args:
        on_gpu: whether the trainers have GPUs; a plan assumes that they will.
    """
    if config.model.bf16 is not None:
        return config
    return replace(config, model=replace(config.model, bf16=on_gpu))
