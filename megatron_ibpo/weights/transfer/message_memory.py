"""CPU memory for messages, used again as soon as nothing lies in it any more.

To touch memory for the first time costs as much as to receive into it, so a pass over the weights should
do that with a few buckets, not with all of them.
"""

import mmap
import sys

import torch

UNUSED = 3
"""References to a block in which no tensor lies: the list's, the loop's and `getrefcount`'s own."""


class Memory:
    """Blocks of huge pages. A block is free when the last tensor in it, or view of one, has gone."""

    def __init__(self, step: int) -> None:
        """
        Args:
            step: blocks are multiples of so many bytes, so that a later message fits where an earlier was.
        """
        self._step = max(1, step)
        self._blocks: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Undefined bytes, uint8 [num_bytes]."""
        size = -(-num_bytes // self._step) * self._step
        free = [block for block in self._blocks if sys.getrefcount(block) == UNUSED]
        fitting = [block for block in free if size <= len(block) <= 2 * size]
        if not fitting:
            # what is free but does not fit makes room
            self._blocks = [block for block in self._blocks if not any(block is other for other in free)]
            fitting = [_huge_pages(size)]
            self._blocks += fitting
        return torch.frombuffer(fitting[0], dtype=torch.uint8, count=num_bytes)


def _huge_pages(num_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    return block
