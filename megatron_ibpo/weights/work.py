"""Files written by a few threads at once, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

__all__ = ["Job", "Turn", "run_jobs"]

MAX_THREADS = 8
MEMORY = 768 * 1024**2
"""Bytes of tensors in work at once; more only for a single tensor that needs it."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job(Generic[Item]):
    """A file and what goes into it."""

    file: str
    items: Sequence[Item]
    num_bytes: int


class Stopped(Exception):
    """Another thread failed."""


class Turn:
    """Lets threads begin a tensor when there is memory for it, and ends them when one has failed."""

    def __init__(self) -> None:
        self._used = 0
        self._stopping = False
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, num_bytes: int) -> Iterator[None]:
        """Raises Stopped instead when the work has been given up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or not self._used or self._used + num_bytes <= MEMORY
            )
            if self._stopping:
                raise Stopped
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()


def run_jobs(jobs: list[Job[Item]], work: Callable[[Job[Item], Turn], Result]) -> list[Result]:
    """`work` on every job, in threads; the first error ends all of them and is raised."""
    threads = max(1, min(len(jobs), len(os.sched_getaffinity(0)), MAX_THREADS))
    turn = Turn()
    inner = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads here are enough
    try:
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(work, job, turn) for job in jobs]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                turn.stop()
    finally:
        torch.set_num_threads(inner)
    for future in futures:
        if (error := future.exception()) is not None and not isinstance(error, Stopped):
            raise error
    return [future.result() for future in futures]
