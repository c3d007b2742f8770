"""The reward functions on every node of a run; each call goes to the node with the shortest queue."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from megatron_ibpo.basics.text import counted
from megatron_ibpo.cluster.actor import Host, on_node, result
from megatron_ibpo.cluster.placement import Node
from megatron_ibpo.config import ConfigError, DataConfig, user_directory
from megatron_ibpo.rewards import Outcome, Pool, WorkerError, open_pool, worker_count

FACTORY = "megatron_ibpo.cluster.verifiers:NodePool"
CALLS_AT_ONCE = 4
"""Concurrent calls of an actor: one waits for outcomes while others submit."""
START_TIMEOUT_S = 300.0
"""Seconds for an actor to start and its worker processes to import the reward function."""
TAKE_S = 5.0
"""Seconds that one look at an actor may take when nothing is finished."""
SLACK_S = 30.0
"""Seconds for an answer to come back. An actor that takes longer is considered lost, with its node."""
ALLOWED_RESTARTS = 3
"""Restarts of a node's actor per run. If it keeps dying, restarting does not fix the cause."""
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class NodePool:
    """The object inside the actor: a pool that takes calls and returns finished ones."""

    def __init__(self, data: DataConfig, rm_types: Sequence[str]) -> None:
        """See `open_pool`."""
        self._pool = open_pool(data, rm_types)
        self._finished: queue.SimpleQueue[tuple[int, Future[Outcome]]] = queue.SimpleQueue()
        self._deaths_told = 0

    def submit(self, number: int, target: str, arguments: tuple[Any, ...]) -> None:
        outcome = self._pool.submit(target, arguments)
        outcome.add_done_callback(lambda done: self._finished.put((number, done)))

    def take(self, timeout: float) -> tuple[list[tuple[int, Outcome]], int]:
        """Return the calls finished since the last look, and the number of worker processes that died. Wait
        up to `timeout` seconds for the first call.

        Raises:
            WorkerError: a process that had to be replaced does not start again.
        """
        finished = []
        with suppress(queue.Empty):
            finished.append(self._finished.get(timeout=timeout))
            while True:
                finished.append(self._finished.get_nowait())
        deaths, self._deaths_told = self._pool.deaths - self._deaths_told, self._pool.deaths
        return [(number, outcome.result()) for number, outcome in finished], deaths


@dataclass(frozen=True, slots=True)
class _Call:
    target: str
    arguments: tuple[Any, ...]
    outcome: Future[Outcome]


@dataclass(eq=False)
class _Lane:
    """The actor of one node and its unfinished calls."""

    node: Node
    host: Host
    workers: int
    """Number of processes of its pool."""
    takes_calls: bool = False
    open: dict[int, _Call] = field(default_factory=dict)


class Verifiers:
    """The worker processes of all nodes as one pool (`rewards.Pool`): the driver's own, and an actor with as
    many on every other node.

    On the driver's node alone, a call goes straight to its own pool. Unfinished calls of a dead actor are
    made again elsewhere; the actor is restarted as long as its node is alive.
    """

    def __init__(
        self, own: Pool, nodes: Sequence[Node], data: DataConfig, rm_types: Iterable[str] = ()
    ) -> None:
        """Start the actors, without waiting.

        Args:
            own: the driver's own pool, closed by its opener.
            nodes: nodes of the run, including the driver's.
            rm_types: verifiers that will be needed besides that of `data`.
        """
        self._own, self._own_open = own, 0
        self._deaths_elsewhere = 0
        """Deaths in this run of actors and of their worker processes."""
        self._own_workers = worker_count(data)
        self._data, self._rm_types = data, tuple(rm_types)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Protects the lanes and the counts here."""
        self._closed = False
        here = ray.get_runtime_context().get_node_id()
        self._lanes = []
        for node in nodes:
            if node.node_id != here:
                workers = worker_count(data, node.cpus)
                self._lanes.append(_Lane(node, self._launch(node, workers), workers))
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=lane.host.name, daemon=True)
            for lane in self._lanes
        ]

    @property
    def deaths(self) -> int:
        """Verifiers that died in this run: worker processes, and the actors of nodes."""
        return self._own.deaths + self._deaths_elsewhere

    def workers(self, node: Node) -> int:
        """Return the number of verifier processes on a node of the run."""
        return next((lane.workers for lane in self._lanes if lane.node == node), self._own_workers)

    def wait_ready(self) -> None:
        """Wait until every actor can take calls.

        Raises:
            WorkerError: the function cannot be loaded on a node, or a node lacks the sandbox for programs.
            ProcessDiedError: an actor did not start.
        """
        for lane in self._lanes:
            try:
                self._await_built(lane)
            except (WorkerError, ConfigError) as error:
                raise WorkerError(f"{lane.host.name}: {error}") from None
        for thread in self._threads:
            thread.start()

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        """See `WorkerPool.submit`."""
        with self._lock:
            lane = self._least_busy()
            if lane is not None:
                call = _Call(target, arguments, Future())
                number = next(self._numbers)
                lane.open[number] = call
                lane.host.call("submit", number, target, arguments)  # shows when outcomes are taken
                return call.outcome
            self._own_open += 1
        outcome = self._own.submit(target, arguments)
        outcome.add_done_callback(self._count_own)
        return outcome

    def close(self) -> None:
        """End the actors and their processes; cancel their unfinished calls."""
        self._closed = True
        for lane in self._lanes:
            lane.host.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_TIMEOUT_S)
        for lane in self._lanes:
            for call in lane.open.values():
                call.outcome.cancel()

    def __enter__(self) -> Verifiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _least_busy(self) -> _Lane | None:
        """Return the node with the fewest waiting calls per worker. None is the driver's, which is preferred,
        since nothing has to be sent."""
        lanes = [lane for lane in self._lanes if lane.takes_calls]
        least = min(lanes, key=lambda lane: len(lane.open) / lane.workers, default=None)
        if least is None or self._own_open // self._own_workers <= len(least.open) // least.workers:
            return None
        return least

    def _count_own(self, _: Future[Outcome]) -> None:
        with self._lock:
            self._own_open -= 1

    # --------------------------------------------------------------------------------------- one node

    def _launch(self, node: Node, workers: int) -> Host:
        host = Host(
            f"verifier of {node.address}",
            on_node(node.node_id),
            gpus=0,
            threads=CALLS_AT_ONCE,
            environment={"IBPO_CWD": str(user_directory())},  # where import paths are looked up
        )
        host.build(FACTORY, {}, replace(self._data, reward_workers=workers), self._rm_types)
        return host

    def _await_built(self, lane: _Lane) -> None:
        result(lane.host.built, lane.host.name, START_TIMEOUT_S)
        with self._lock:
            lane.takes_calls = True

    def _serve(self, lane: _Lane) -> None:
        """Run the thread of one node."""
        for restarts in range(ALLOWED_RESTARTS + 1):
            try:
                if restarts:
                    self._restart(lane)
                self._collect(lane)
            except Exception as error:  # any error of Ray's about a lost actor or node
                if not self._closed:
                    self._give_up(lane, error)
            if self._closed or not _is_alive(lane.node):
                break
        if not self._closed:
            log.warning("%s is not started again; the other nodes score what is left", lane.host.name)

    def _restart(self, lane: _Lane) -> None:
        log.warning("starting %s again", lane.host.name)
        lane.host = self._launch(lane.node, lane.workers)
        if self._closed:  # closed meanwhile, without seeing this one
            lane.host.kill()
        self._await_built(lane)

    def _collect(self, lane: _Lane) -> None:
        """Take finished calls of the actor until the end of the run."""
        while not self._closed:
            taken = lane.host.call("take", TAKE_S)
            finished, deaths = result(taken, lane.host.name, TAKE_S + SLACK_S)
            if deaths:  # its own log is on another node
                log.warning("%s: %s died; calls made again", lane.host.name, counted(deaths, "worker"))
                with self._lock:
                    self._deaths_elsewhere += deaths
            for number, outcome in finished:
                with self._lock:
                    call = lane.open.pop(number)
                if call.outcome.set_running_or_notify_cancel():
                    call.outcome.set_result(outcome)

    def _give_up(self, lane: _Lane, error: Exception) -> None:
        """Repeat a lost actor's unfinished calls elsewhere."""
        with self._lock:
            self._deaths_elsewhere += (
                lane.takes_calls
            )  # otherwise it did not come up again, and its death is counted
            lane.takes_calls = False
            orphans, lane.open = list(lane.open.values()), {}
        lane.host.kill()
        log.warning("%s; %s asked elsewhere", error, counted(len(orphans), "call"))
        for call in orphans:
            if not call.outcome.cancelled():
                self.submit(call.target, call.arguments).add_done_callback(partial(_hand_on, call.outcome))


def _hand_on(to: Future[Outcome], done: Future[Outcome]) -> None:
    """Copy the result of `done` to `to`."""
    if done.cancelled():
        to.cancel()
    elif to.set_running_or_notify_cancel():
        if (error := done.exception()) is not None:
            to.set_exception(error)
        else:
            to.set_result(done.result())


def _is_alive(node: Node) -> bool:
    return any(known["NodeID"] == node.node_id and known["Alive"] for known in ray.nodes())
