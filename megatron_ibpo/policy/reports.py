"""What trainer ranks tell the driver, which reads it without importing torch or Megatron."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    """What the driver cannot know before the model is built."""

    parameters: int
    """Of the whole model."""
    loss_backend: str
    """What computes the loss, and why."""
    layers: dict[str, tuple[str, str]]
    """Part of a layer → (the library that computes it, how)."""
    device: str
    """What computes: the name that a GPU gives itself, or "CPU"."""
    notes: tuple[str, ...]
    """Lines for the user about the environment and the checkpoint that was loaded."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one pass over the weights, as this rank saw it."""

    failures: dict[int, str]
    """By engine: why it has no part in the update any more."""
    num_bytes: int
    """Bytes that this rank gave to engines."""
    needed_bytes: int
    """Bytes that the shards of all engines' workers take."""
