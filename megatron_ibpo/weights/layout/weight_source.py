"""What the trainer offers to whoever wants its weights: names and shapes, who holds what, and the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Box", "Region", "TensorMeta", "WeightSource"]

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension of a tensor."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a checkpoint in Hugging Face format."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor, and the trainer ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


class WeightSource(Protocol):
    """The policy's weights under their Hugging Face names, as the trainer's ranks hold them.

    `metadata` and `regions` are equal on every rank and never change; nothing here communicates.
    """

    def metadata(self) -> list[TensorMeta]:
        """The tensors, in the order in which they are sent."""
        ...

    def regions(self) -> list[tuple[Region, ...]]:
        """Of each tensor: disjoint regions that cover it."""
        ...

    def local(self) -> Iterator[Mapping[Box, torch.Tensor]]:
        """One pass over the tensors: the regions that this rank holds, by their boxes; empty where it holds
        none. They may share memory with the model."""
        ...
