"""What the trainer offers to whoever wants its weights: names and shapes first, then a stream of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["TensorMeta", "WeightSource"]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a checkpoint in Hugging Face format."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class WeightSource(Protocol):
    """The policy's weights under their Hugging Face names, whole, whatever the trainer's layout.

    Iterating is collective: every trainer rank does it, in the same order. Each pass is a fresh one.
    """

    def metadata(self) -> list[TensorMeta]:
        """What a pass will yield, in its order; equal on every rank, nothing is transferred."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, whole tensor) in the trainer's dtype; the tensor may be None except on global rank 0."""
        ...
