"""An actor on each other node of a run, which answers calls; one that dies is started again."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import ray

from megatron_ibpo.basics.text import counted
from megatron_ibpo.cluster.actor import Host, on_node, result
from megatron_ibpo.cluster.placement import Node
from megatron_ibpo.config import ConfigError, user_directory
from megatron_ibpo.rewards import WorkerError

CALLS_AT_ONCE = 4
"""Concurrent calls of an actor: one waits for outcomes while others submit."""
START_TIMEOUT_S = 300.0
"""Seconds for an actor to start and its worker processes to import what they run."""
TAKE_S = 5.0
"""Seconds that one look at an actor may take when nothing is finished."""
SLACK_S = 30.0
"""Seconds for an answer to come back. An actor that takes longer is considered lost, with its node."""
ALLOWED_RESTARTS = 3
"""Restarts of a node's actor per run. If it keeps dying, restarting does not fix the cause."""
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class NodeObject:
    """The object inside an actor: it has a pool of processes, takes calls by `submit(number, *arguments)` and
    hands over finished ones."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._finished_calls: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._deaths_told = 0

    def follow(self, number: int, outcome: Future[Any]) -> None:
        """Hand the call over once it has an outcome."""
        outcome.add_done_callback(lambda done: self._finished_calls.put((number, done)))

    def take(self, timeout: float) -> tuple[list[tuple[int, Any]], int]:
        """Return the outcomes of calls finished since the last look, and the number of worker processes that
        died since. Wait up to `timeout` seconds for the first call. Raises what a call raised, and
        WorkerError if a process that had to be replaced does not start again."""
        finished = []
        with suppress(queue.Empty):
            finished.append(self._finished_calls.get(timeout=timeout))
            while True:
                finished.append(self._finished_calls.get_nowait())
        previous, self._deaths_told = self._deaths_told, self._pool.deaths
        return [(number, outcome.result()) for number, outcome in finished], self._deaths_told - previous


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an actor's `submit`."""

    arguments: tuple[Any, ...]
    outcome: Future[Any]


@dataclass(eq=False)
class NodeActor:
    """The actor of one node and its unfinished calls."""

    node: Node
    host: Host
    workers: int
    """Number of processes that work for it at one time."""
    arguments: tuple[Any, ...]
    """Arguments of its object."""
    takes_calls: bool = False
    open: dict[int, Call] = field(default_factory=dict)


class OnAllNodes:
    """Work on all nodes: in the driver's own pool, closed by its opener, and by an actor on every other node,
    which is restarted as long as its node is alive."""

    name: str
    """Name of an actor in messages, such as "verifier"."""
    factory: str
    """module:name of the class of the actors' objects, a `NodeObject`."""

    def __init__(
        self,
        driver_pool: Any,
        nodes: Sequence[Node],
        arguments_of: Callable[[Node], tuple[int, tuple[Any, ...]]],
    ) -> None:
        """Start the actors on the `nodes` of the run, without waiting; `arguments_of` a node returns (number
        of workers, arguments of `factory`)."""
        self.driver_pool = driver_pool
        self._numbers = itertools.count()
        self.lock = threading.Lock()
        """Protects the actors' calls, and the counts of subclasses."""
        self._deaths = 0
        self._closed = False
        driver_node = ray.get_runtime_context().get_node_id()
        self.actors: list[NodeActor] = []
        for node in nodes:
            if node.node_id != driver_node:
                workers, arguments = arguments_of(node)
                self.actors.append(NodeActor(node, self._launch(node, arguments), workers, arguments))
        self._threads = [
            threading.Thread(target=self._serve, args=(actor,), name=actor.host.name, daemon=True)
            for actor in self.actors
        ]

    def settle(self, actor: NodeActor, orphans: list[Call]) -> None:
        """Settle the unfinished calls of an actor that died."""
        raise NotImplementedError

    @property
    def deaths(self) -> int:
        """Processes that died in this run: worker processes on all nodes, and the actors."""
        return self.driver_pool.deaths + self._deaths

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Wait until every actor can take calls. Raises WorkerError if an object cannot be built on its node,
        and ProcessDiedError if an actor did not start."""
        for actor in self.actors:
            try:
                self._await_built(actor)
            except (WorkerError, ConfigError) as error:
                raise WorkerError(f"{actor.host.name}: {error}") from None
        for thread in self._threads:
            thread.start()

    def ask(self, actor: NodeActor, *arguments: Any) -> Future[Any]:
        """Submit a call to an actor that takes calls, with `lock` held; the future gets what it returns."""
        call = Call(arguments, Future())
        number = next(self._numbers)
        actor.open[number] = call
        actor.host.call("submit", number, *arguments)  # errors show when outcomes are taken
        return call.outcome

    def close(self) -> None:
        """End the actors and their processes; cancel their unfinished calls."""
        self._closed = True
        for actor in self.actors:
            actor.host.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_TIMEOUT_S)
        for actor in self.actors:
            for call in actor.open.values():
                call.outcome.cancel()

    def _launch(self, node: Node, arguments: tuple[Any, ...]) -> Host:
        host = Host(
            f"{self.name} of {node.address}",
            on_node(node.node_id),
            gpus=0,
            threads=CALLS_AT_ONCE,
            environment={"IBPO_CWD": str(user_directory())},  # where import paths are looked up
        )
        host.build(self.factory, {}, *arguments)
        return host

    def _await_built(self, actor: NodeActor) -> None:
        result(actor.host.built, actor.host.name, START_TIMEOUT_S)
        with self.lock:
            actor.takes_calls = True

    def _serve(self, actor: NodeActor) -> None:
        """Run the thread of one actor."""
        for restarts in range(ALLOWED_RESTARTS + 1):
            try:
                if restarts:
                    log.warning("starting %s again", actor.host.name)
                    actor.host = self._launch(actor.node, actor.arguments)
                    if self._closed:  # closed meanwhile, without seeing this one
                        actor.host.kill()
                    self._await_built(actor)
                self._collect(actor)
            except Exception as error:  # any error of Ray's about a lost actor or node
                if not self._closed:
                    self._give_up(actor, error)
            alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
            if self._closed or actor.node.node_id not in alive:
                break
        if not self._closed:
            log.warning("%s is not started again; the other nodes take over its work", actor.host.name)

    def _collect(self, actor: NodeActor) -> None:
        """Take finished calls of the actor until the end of the run."""
        while not self._closed:
            ref = actor.host.call("take", TAKE_S)
            finished, deaths = result(ref, actor.host.name, TAKE_S + SLACK_S)
            if deaths:  # its own log is on another node
                log.warning("%s: %s died", actor.host.name, counted(deaths, "worker"))
            with self.lock:
                self._deaths += deaths
                calls = [(actor.open.pop(number), outcome) for number, outcome in finished]
            for call, outcome in calls:
                if call.outcome.set_running_or_notify_cancel():
                    call.outcome.set_result(outcome)

    def _give_up(self, actor: NodeActor, error: Exception) -> None:
        with self.lock:
            # one that did not come up again was counted before
            self._deaths += actor.takes_calls
            actor.takes_calls = False
            orphans, actor.open = list(actor.open.values()), {}
        actor.host.kill()
        log.warning("%s; it had %s in progress", error, counted(len(orphans), "call"))
        self.settle(actor, orphans)
