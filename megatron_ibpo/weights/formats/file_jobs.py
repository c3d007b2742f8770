"""Concurrent writing of files by a few threads, in bounded memory."""

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

THREADS_PER_CORE = 2
"""Threads per core: one computes while the other waits for the disk."""
MAX_THREADS = 8
MEMORY = 768 * 1024**2
"""Bytes of tensors in work at once; only a single larger tensor may exceed it."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job(Generic[Item]):
    """A file and its content."""

    file: str
    items: Sequence[Item]
    num_bytes: int


class Stopped(Exception):
    """Raised in a thread because another thread failed."""


class WorkingMemory:
    """Memory that threads share to work in. A thread waits until some is free, and ends when another thread
    has failed.

    Memory is reused: the kernel takes longer to hand out fresh pages than it takes to fill them.
    """

    def __init__(self) -> None:
        self._used = 0
        self._free: list[mmap.mmap] = []
        self._stopping = False
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a tensor with undefined content. Raises Stopped when another thread has failed."""
        count = math.prod(shape)
        memory = self._take(max(count * dtype.itemsize, mmap.PAGESIZE))
        try:
            yield torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
        finally:
            with self._changed:
                self._free.append(memory)
                self._changed.notify_all()

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._changed:
            while not self._stopping:
                fitting = [memory for memory in self._free if len(memory) >= num_bytes]
                if fitting:
                    memory = min(fitting, key=len)
                    self._free.remove(memory)
                    return memory
                self._used -= sum(len(memory) for memory in self._free)  # all of it too small
                self._free.clear()
                if not self._used or self._used + num_bytes <= MEMORY:
                    self._used += num_bytes
                    return _fresh(num_bytes)
                self._changed.wait()
            raise Stopped

    def check(self) -> None:
        """Raise Stopped when another thread has failed."""
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


def _fresh(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def run_jobs(jobs: list[Job[Item]], work: Callable[[Job[Item], WorkingMemory], Result]) -> list[Result]:
    """Run `work` on every job, in threads; the first error ends all of them and is raised."""
    threads = max(1, min(len(jobs), THREADS_PER_CORE * len(os.sched_getaffinity(0)), MAX_THREADS))
    working_memory = WorkingMemory()
    inner = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads here are enough
    try:
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(work, job, working_memory) for job in jobs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                working_memory.stop()
    finally:
        torch.set_num_threads(inner)
    for future in futures:
        if (error := future.exception()) is not None and not isinstance(error, Stopped):
            raise error
    return [future.result() for future in futures]
