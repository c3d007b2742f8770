"""CPU memory for messages, reused as soon as no tensor is in it.

Touching memory for the first time costs as much as receiving into it, so a pass over the weights should do
that for a few buckets only.
"""

import mmap
import sys

import torch

UNUSED = 3
"""References to an unused block: the list's, the loop's and `getrefcount`'s own."""


class Memory:
    """Blocks of huge pages. A block is free when the last tensor in it, or view of one, is gone."""

    def __init__(self, step: int) -> None:
        """
        Args:
            step: blocks are multiples of this many bytes, so that a later message fits in an earlier one's
                place.
        """
        self._step = max(1, step)
        self._blocks: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return undefined bytes, uint8 [num_bytes]."""
        size = -(-num_bytes // self._step) * self._step
        free = [block for block in self._blocks if sys.getrefcount(block) == UNUSED]
        fitting = [block for block in free if size <= len(block) <= 2 * size]
        if not fitting:
            # free blocks that do not fit make room
            self._blocks = [block for block in self._blocks if not any(block is other for other in free)]
            fitting = [_huge_pages(size)]
            self._blocks += fitting
        return torch.frombuffer(fitting[0], dtype=torch.uint8, count=num_bytes)


def _huge_pages(num_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block
