"""A pool of killable processes that run functions: a process that hangs is killed, one that dies is
replaced."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

from megatron_ibpo.basics.supervised import Supervised
from megatron_ibpo.basics.text import counted, error_text
from megatron_ibpo.rewards.sandbox.control_groups import remove_groups

_START_TIMEOUT = 120.0
"""Seconds a worker may take to start, including the imports of the reward function."""
_SHORTEST_START_TIMEOUT = 10.0
_START_SLACK = 10.0
"""Factor by which a successor may start slower than the first processes; beyond it, it is taken to hang."""
_CLOSE_TIMEOUT = 5.0
_STARTS = 3
"""Starts of a successor. It may be killed while loading the function, as the one before it was; not
endlessly."""
_LARGEST_BATCH = 64
"""Calls that a batched function gets at once: all that wait when a worker is free, up to this many."""
_PRINTED_BYTES = 64 << 10
"""Bytes that a process may print. The n-th successor may print an n-th of it, so that functions that print
and die fill no disk either."""
_DEATHS_TOLD = 10
"""Deaths that are reported one by one; later the 16th, the 32nd and so on are, since all may have one
cause."""

_log = logging.getLogger(__name__)


class WorkerError(ValueError):
    """The function cannot be loaded, or its process cannot be started."""


class _NotLoadedError(WorkerError):
    """The process ended while loading the function, or never finished; the next one may."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: a value, or why there is none."""

    value: float | None
    error: str | None = None
    details: dict[str, float] = field(default_factory=dict)
    """Further numbers that the function gave with the value."""
    trace: str | None = field(default=None, compare=False, repr=False)


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """A pool that runs functions, each named as package.module:function, in `size` processes of its own. A
    thread of this process serves each of them: it starts the process, sends it one call after another, and
    replaces it. The kernel kills a process when the thread that started it ends."""

    def __init__(self, targets: Sequence[str], *, size: int, timeout: float):
        """Start the processes; they load the functions meanwhile (`wait_ready`).

        Args:
            targets: functions that will be called; any other is loaded by the first call that names it.
            timeout: seconds one call may take.
        """
        self._targets = tuple(targets)
        self._timeout = timeout
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self.deaths = 0
        """Processes that died by themselves or were killed from outside; those ended here do not count."""
        self._started_in = 0.0
        """Start-up time in seconds of the slowest of the first processes."""
        self._size, self._starts = size, 0
        """Processes at one time, and those started so far."""
        self._lock = threading.Lock()
        """Guards `_workers`, `deaths`, `_started_in`, `_starts` and `_closed`."""
        self._closed = False
        self._ready: list[Future[None]] = [Future() for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._run_worker, args=(ready,), name="verifier", daemon=True)
            for ready in self._ready
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait until all processes have loaded the functions. Raises WorkerError with the reason if one
        cannot be loaded; the pool is closed then."""
        try:
            for ready in self._ready:
                ready.result(2 * _START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        """Submit one call of `target`; the future gets its outcome, with an error if the call raises, exceeds
        the time-out, or is made twice because its process dies, and dies again. Other calls are not affected.
        The future raises WorkerError when a process that had to be replaced does not start again, and `close`
        cancels it."""
        call = _Call(target, arguments, Future())
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self._calls.put(call)
        return call.outcome

    def close(self) -> None:
        """End the processes; calls that no process has begun are cancelled."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.kill()  # and everything it has started
        with suppress(queue.Empty):
            while call := self._calls.get_nowait():
                call.outcome.cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_TIMEOUT)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_worker(self, started: Future[None]) -> None:
        """Run the thread of one worker and its successors."""
        began = time.monotonic()
        try:
            worker = self._start(_START_TIMEOUT)
        except WorkerError as error:
            started.set_exception(error)
            return
        with self._lock:
            self._started_in = max(self._started_in, time.monotonic() - began)
        started.set_result(None)
        while queued_calls := self._next_calls(worker.batched):
            for _, calls in groupby(queued_calls, key=lambda call: call.target):
                worker = self._settled(worker, list(calls))
        self._end(worker)

    def _settled(self, worker: _Worker, calls: list[_Call]) -> _Worker:
        """Answer the calls as `_settle` does, or with the error of a worker that cannot be replaced."""
        try:
            return self._settle(self._alive(worker), calls)
        except WorkerError as error:
            for call in calls:
                if not call.outcome.done():
                    call.outcome.set_exception(error)
            return worker

    def _settle(self, worker: _Worker, calls: list[_Call], *, once_more: bool = True) -> _Worker:
        """Get the calls, all of one function, answered; return the worker that is left. When a batch fails as
        a whole, each of its calls is made again alone, so that a call that kills or hangs spoils no other. A
        call whose process died is made once more, since it need not be the cause; a time-out is not."""
        target = calls[0].target
        outcomes, fault = worker.ask(target, [call.arguments for call in calls], self._timeout)
        died = fault is not None and fault.died
        retries = fault is not None and (len(calls) > 1 or (died and once_more))
        if fault is not None and died:
            so = f"{counted(len(calls), 'call')} {'repeated' if retries else 'failed'}"
            self._count_death(target, fault.reason, so)
        if retries:
            for call in calls:
                worker = self._settle(self._alive(worker), [call], once_more=once_more and not died)
            return worker
        if fault is not None:
            error_message = f"{fault.reason}, and another one before it" if died else fault.reason
            outcomes = [Outcome(None, error_message, trace=fault.trace)]
        for call, outcome in zip(calls, outcomes, strict=True):
            call.outcome.set_result(outcome)
        return worker

    def _next_calls(self, batched: Sequence[str]) -> list[_Call]:
        """Return the next call and those waiting behind it, up to the first of a function that is not
        batched; none when the pool is closed."""
        calls: list[_Call] = []
        with suppress(queue.Empty):
            while not calls or (len(calls) < _LARGEST_BATCH and calls[-1].target in batched):
                call = self._calls.get(block=not calls)
                if call is None:
                    if calls:
                        self._calls.put(None)  # for the next reader
                    break
                if call.outcome.set_running_or_notify_cancel():
                    calls.append(call)
        return calls

    def _alive(self, worker: _Worker) -> _Worker:
        """Return the worker, or its successor if it died."""
        if worker.process.is_alive():
            return worker
        if not worker.ended:
            self._count_death(", ".join(self._targets), worker.how_it_died(), "it was idle")
        self._end(worker)
        with self._lock:
            timeout = max(_SHORTEST_START_TIMEOUT, _START_SLACK * self._started_in)
        for _ in range(_STARTS - 1):
            with suppress(_NotLoadedError):
                return self._start(timeout)
        return self._start(timeout)

    def _count_death(self, function_name: str, reason: str, so: str) -> None:
        with self._lock:
            if self._closed:  # closing it is why it died
                return
            self.deaths += 1
            deaths = self.deaths
        if deaths <= _DEATHS_TOLD or deaths.bit_count() == 1:
            _log.warning("%s: %s; %s (death %d)", function_name, reason, so, deaths)

    def _start(self, timeout: float) -> _Worker:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self._starts += 1
            worker = _Worker(self._targets, _PRINTED_BYTES // max(1, self._starts - self._size))
            self._workers.append(worker)
        try:
            worker.await_ready(timeout)
        except WorkerError:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)

    def _closed_error(self) -> WorkerError:
        return WorkerError(f"reward function {', '.join(self._targets)}: its processes have been closed")


@dataclass(frozen=True)
class _Call:
    target: str
    arguments: tuple[Any, ...]
    outcome: Future[Outcome]


@dataclass(frozen=True)
class _Fault:
    """The reason why a worker has no outcomes."""

    reason: str
    died: bool = False
    trace: str | None = None


class _Worker:
    """One process, which may print so many bytes, and the connection to it."""

    def __init__(self, targets: Sequence[str], printed: int):
        ours, theirs = socket.socketpair()
        self._named = f"reward function {', '.join(targets)}"
        connection = str(theirs.fileno())
        command = [sys.executable, "-m", "megatron_ibpo.rewards.worker", connection, "{owner}", *targets]
        with theirs:
            self.process = Supervised(command, theirs, printed=printed, name=self._named)
        self._connection = Connection(ours.detach())
        self._worker: int | None = None
        """Process id of the worker itself; known once the functions are loaded."""
        self.ended = False
        self.batched: list[str] = []
        """Functions that take many calls at once; known once they are loaded."""

    def await_ready(self, timeout: float) -> None:
        """Wait until the functions are loaded; raise WorkerError if one cannot be."""
        if not self._connection.poll(timeout):
            raise _NotLoadedError(f"{self._named}: not loaded after {timeout:.0f} s")
        try:
            status, content = self._connection.recv()
        except (EOFError, OSError):
            ended = f"its process ended while loading it (status {self.process.wait()})"
            raise _NotLoadedError(f"{self._named}: {ended}; the reason is in the lines above") from None
        if status != "ready":
            raise WorkerError(f"the reward function cannot be loaded: {content}")
        self._worker, self.batched = content

    def ask(
        self, target: str, calls: list[tuple[Any, ...]], timeout: float
    ) -> tuple[list[Outcome], _Fault | None]:
        """Return (the outcome of each call, None), or ([], why there are none). A process that exceeds
        `timeout` seconds per call is killed."""
        seconds = timeout * len(calls)
        try:
            message = pickle.dumps((target, calls))
        except Exception as error:  # say, metadata that nest a thousand levels deep
            return [], _Fault(f"what it is called with cannot be sent: {error_text(error)}")
        try:
            self._connection.send_bytes(message)
            if not self._connection.poll(seconds):
                self.end()
                return [], _Fault(f"timed out after {seconds:g} s")
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            self.end()
            return [], _Fault(self.how_it_died(), died=True)
        if kind == "error":
            reason, trace = content
            return [], _Fault(reason, trace=trace)
        return [Outcome(value, error, details) for value, details, error in content], None

    def how_it_died(self) -> str:
        return f"the worker process died ({self.process.exit_reason()})"

    def end(self) -> None:
        self.ended = True
        self.process.end()
        if self._worker is not None:
            with suppress(ProcessLookupError):  # there is something left only if the supervisor was killed
                os.killpg(self._worker, signal.SIGKILL)
            remove_groups(self._worker)
        self._connection.close()
