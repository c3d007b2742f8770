"""Reports of trainer ranks to the driver, which reads them without importing torch or Megatron."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    """Facts that the driver cannot know before the model is built."""

    parameters: int
    """Number of parameters of the whole model."""
    loss_backend: str
    """Back end that computes the loss, and why."""
    layers: dict[str, tuple[str, str]]
    """Part of a layer → (the library that computes it, how)."""
    device: str
    """Device that computes: the GPU's own name, or "CPU"."""
    notes: tuple[str, ...]
    """Lines for the user about the environment and the loaded checkpoint."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """The outcome of one pass over the weights, as this rank saw it."""

    failures: dict[int, str]
    """Index of an engine → why it no longer takes part in the update."""
    num_bytes: int
    """Bytes that this rank sent to engines."""
    needed_bytes: int
    """Bytes that the shards of all engines' workers take."""
    waits: tuple[int, float]
    """Number and seconds of waits between buckets, as in `weights.transfer.link.Sent`."""
