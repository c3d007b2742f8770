"""Simulated engines in virtual time: hours of a cluster's sampling in a second of a test."""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from megatron_ibpo.basics.records import Sample, SampleRequest, TokenIds, token_ids
from megatron_ibpo.engines import EngineDiedError

__all__ = ["SimulatedEngine", "StepTime", "in_virtual_time"]

T = TypeVar("T")


def in_virtual_time(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Return (result, seconds that it would take). The clock jumps to the next event while all tasks wait."""
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(work), loop.time()
    finally:
        if pending := asyncio.all_tasks(loop):
            for task in pending:
                task.cancel()
            loop.run_until_complete(asyncio.wait(pending))
        loop.close()


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    """A selector that does not wait until a timer is due, but reports that it has."""

    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("all tasks wait, and no timer will wake one")
            self._loop.now += max(0.0, timeout)
        return events


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time in which an engine writes one token of every running sequence."""

    fixed: float
    """Seconds to read the weights."""
    per_sequence: float
    """Seconds to read one sequence's cache, with its share of the arithmetic."""

    def __call__(self, running: int) -> float:
        return self.fixed + self.per_sequence * running


@dataclass(eq=False)
class SimulatedEngine:
    """An `engines.AsyncEngine` in virtual time: its requests run concurrently, with one token per step."""

    step_time: StepTime
    write: Callable[[SampleRequest], Sequence[int] | TokenIds]
    """Return the response to a request."""
    dies_at: float | None = None
    """Time at which it ends and forgets everything; None: never."""
    hangs_at: float | None = None
    """Time from which it finishes nothing."""
    asked: list[tuple[float, SampleRequest]] = field(default_factory=list)
    """(time, request) for each request received."""
    aborted: list[int] = field(default_factory=list)
    end: str | None = None
    """Reason why it was killed."""
    most_running: int | None = None
    """Most requests that run at once; the others wait in order of arrival. None: all run."""

    def __post_init__(self) -> None:
        self._steps = 0.0
        self._at = 0.0
        """Time up to which steps have been taken."""
        self._running: dict[int, tuple[float, Sample]] = {}
        """Number of a request → (the step in which it ends, its sample)."""
        self._ends: list[tuple[float, int]] = []
        """Heap of the same, and of requests aborted since."""
        self._waiting: dict[int, SampleRequest] = {}
        self._version = 0
        self._paused = False
        self._news = asyncio.Event()

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        self._advance()
        for number, request in requests:
            self.asked.append((self._at, request))
            self._waiting[number] = request
        self._begin()
        self._news.set()

    async def update(self, version: int, seconds: float) -> None:
        """Take the weights of `version` within `seconds`; running requests continue with them."""
        self._advance()
        self._paused = True
        await asyncio.sleep(seconds)
        self._advance()
        self._paused, self._version = False, version
        for end, sample in self._running.values():
            written = len(sample.token_ids) - math.ceil(end - self._steps - 1e-6)
            versions = sample.versions if written else ()
            sample.versions = (*versions, (written, version))
        self._news.set()

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            self._advance()
            if self._hangs():
                await asyncio.Event().wait()
            if finished := self._finished():
                self._begin()
                return finished
            if self._at >= deadline:
                return []
            self._news.clear()
            due = min(deadline, self._next_end(), self.dies_at or deadline, self.hangs_at or deadline)
            try:
                # the sum of two floats may fall short of `due` by less than the clock can be moved
                await asyncio.wait_for(self._news.wait(), max(due - self._at, 1e-9))
            except TimeoutError:
                continue

    async def abort(self, numbers: Collection[int]) -> None:
        self._advance()
        self.aborted += numbers
        for number in numbers:
            self._running.pop(number, None)
            self._waiting.pop(number, None)
        self._begin()
        self._news.set()  # the others then end sooner

    async def kill(self, reason: str) -> None:
        self.end = reason

    def _begin(self) -> None:
        """Start as many requests as there is room for."""
        room = len(self._waiting) if self.most_running is None else self.most_running - len(self._running)
        for number in list(islice(self._waiting, room)):
            request = self._waiting.pop(number)
            response = token_ids(self.write(request))
            sample = Sample(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=response,
                logprobs=np.zeros(len(response), np.float32),
                finish_reason="stop" if len(response) < request.max_tokens else "length",
                temperature=request.temperature,
                versions=((0, self._version),),
                loss_mask=np.ones(len(response), np.bool_),
            )
            end = self._steps + len(response)
            self._running[number] = (end, sample)
            heapq.heappush(self._ends, (end, number))

    def _finished(self) -> list[tuple[int, Sample]]:
        """Return and forget the sequences that have ended."""
        finished = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, number = heapq.heappop(self._ends)
            if number in self._running:
                finished.append((number, self._running.pop(number)[1]))
        return finished

    def _next_end(self) -> float:
        if not self._running or self._hangs() or self._paused:
            return float("inf")
        while self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self._steps
        return self._at + steps * self.step_time(len(self._running))

    def _hangs(self) -> bool:
        return self.hangs_at is not None and self._at >= self.hangs_at

    def _advance(self) -> None:
        """Take the steps that fit into the time since the last event; all sequences run on until the next
        one."""
        now = asyncio.get_running_loop().time()
        if self.end is not None:
            raise EngineDiedError(self.end)
        if self.dies_at is not None and now >= self.dies_at:
            self.end = "it has ended"
            raise EngineDiedError(self.end)
        if not self._hangs() and not self._paused:
            self._steps += (now - self._at) / self.step_time(len(self._running))
        self._at = now
