"""A pool of killable processes that run one function: what hangs is killed, what dies is replaced."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Outcome", "WorkerError", "WorkerPool"]

_START_TIMEOUT = 120.0
"""Seconds a worker may take to start: the imports of the reward function are in them."""
_CLOSE_TIMEOUT = 5.0


class WorkerError(ValueError):
    """The function cannot be loaded, or its process cannot be started."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call: a value, or why there is none."""

    value: float | None
    error: str | None = None


class WorkerPool:
    """Runs `target` (package.module:function) in `size` processes of its own."""

    def __init__(self, target: str, *, size: int, timeout: float):
        """Starts the processes and waits until the function is loaded in all of them.

        Args:
            timeout: seconds one call may take.

        Raises:
            WorkerError: the function cannot be loaded; with the reason.
        """
        self._target = target
        self._timeout = timeout
        self._workers: list[_Worker] = []
        try:
            for _ in range(size):
                self._workers.append(_Worker(target))
            for worker in self._workers:
                worker.await_ready()
        except BaseException:
            self.close()
            raise

    def call(self, calls: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        """The outcome of every call, in order. A call that raises, takes longer than the time-out, or kills
        its process has an outcome with an error; the others are not affected.

        Raises:
            WorkerError: a process that had to be replaced does not start again.
        """
        outcomes: list[Outcome | None] = [None] * len(calls)
        todo = list(range(len(calls)))[::-1]
        running: dict[_Worker, tuple[int, float]] = {}
        idle = [self._alive(worker) for worker in self._workers]
        while todo or running:
            while todo and idle:
                number, worker = todo.pop(), idle.pop()
                worker.ask(calls[number])
                running[worker] = number, time.monotonic() + self._timeout
            for worker, outcome in self._answered(running):
                number, _ = running.pop(worker)
                outcomes[number] = outcome
                idle.append(self._alive(worker))
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answered(self, running: dict[_Worker, tuple[int, float]]) -> list[tuple[_Worker, Outcome]]:
        """Wait for the next answers or the next deadline; workers past theirs are killed."""
        first_deadline = min(deadline for _, deadline in running.values())
        ready = wait([w.connection for w in running], max(0.0, first_deadline - time.monotonic()))
        found = []
        for worker, (_, deadline) in running.items():
            if worker.connection in ready:
                found.append((worker, worker.answer()))
            elif time.monotonic() >= deadline:
                worker.kill()
                found.append((worker, Outcome(None, f"timed out after {self._timeout:g} s")))
        return found

    def _alive(self, worker: _Worker) -> _Worker:
        """The worker, or its successor if it died."""
        if worker.is_alive():
            return worker
        worker.kill()
        successor = _Worker(self._target)
        self._workers[self._workers.index(worker)] = successor
        successor.await_ready()
        return successor


class _Worker:
    """One process and the connection to it."""

    def __init__(self, target: str):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_ibpo.rewards.worker",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    target,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
                # what the owner can import, the worker can
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.connection = Connection(ours.detach())
        self._target = target

    def await_ready(self) -> None:
        """Wait until the function is loaded; raise WorkerError if it cannot be."""
        if not self.connection.poll(_START_TIMEOUT):
            raise WorkerError(f"reward function {self._target}: not loaded after {_START_TIMEOUT:g} s")
        try:
            status, why = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerError(
                f"reward function {self._target}: its process ended while loading it (status "
                f"{self.process.wait(_CLOSE_TIMEOUT)}); the reason is in the lines above"
            ) from None
        if status != "ready":
            raise WorkerError(f"the reward function cannot be loaded: {why}")

    def ask(self, arguments: tuple[Any, ...]) -> None:
        # a process that has died meanwhile says so in its answer
        with suppress(OSError):
            self.connection.send(arguments)

    def answer(self) -> Outcome:
        """The answer that has arrived; an error if the process died instead of answering."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            self.kill()
            return Outcome(None, f"the worker process died (status {self.process.returncode})")
        return Outcome(content) if kind == "value" else Outcome(None, content)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_CLOSE_TIMEOUT)
        self.connection.close()
