"""The reward functions on every node of a run; each call goes to the node with the shortest queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_ibpo.basics.text import counted
from megatron_ibpo.cluster.node_actors import Call, Finished, NodeActor, NodeActors, OnAllNodes
from megatron_ibpo.cluster.placement import Node, Placement
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import Outcome, Pool, open_pool, worker_count

FACTORY = "megatron_ibpo.cluster.verifiers:NodePool"


class NodePool:
    """The object inside the actor: a pool that takes calls and returns finished ones."""

    def __init__(self, data: DataConfig, rm_types: Sequence[str]) -> None:
        """See `open_pool`."""
        self._pool = open_pool(data, rm_types)
        self._finished = Finished()

    def submit(self, number: int, target: str, arguments: tuple[Any, ...]) -> None:
        self._finished.follow(number, self._pool.submit(target, arguments))

    def take(self, timeout: float) -> tuple[list[tuple[int, Outcome]], int]:
        """See `Finished.take`.

        Raises:
            WorkerError: a process that had to be replaced does not start again.
        """
        return self._finished.take(timeout, lambda: self._pool.deaths)


class Verifiers(OnAllNodes):
    """The worker processes of all nodes as one pool (`rewards.Pool`): the driver's own, and an actor with as
    many on every other node.

    On the driver's node alone, a call goes straight to its own pool. Unfinished calls of a dead actor are
    made again elsewhere; the actor is restarted as long as its node is alive.
    """

    def __init__(
        self, driver_pool: Pool, nodes: Sequence[Node], data: DataConfig, rm_types: Iterable[str] = ()
    ) -> None:
        """Start the actors, without waiting.

        Args:
            driver_pool: the driver's own pool, closed by its opener.
            nodes: nodes of the run, including the driver's.
            rm_types: verifiers that will be needed besides that of `data`.
        """
        self._driver_pool, self._own_open = driver_pool, 0
        self._own_workers = worker_count(data)
        rm_types = tuple(rm_types)

        def of_node(node: Node) -> tuple[int, tuple[Any, ...]]:
            workers = worker_count(data, node.cpus)
            return workers, (replace(data, reward_workers=workers), rm_types)

        self._actors = NodeActors("verifier", FACTORY, nodes, of_node, self._ask_elsewhere)

    def workers(self, node: Node) -> int:
        """Return the number of verifier processes on a node of the run."""
        return next((actor.workers for actor in self._actors.all if actor.node == node), self._own_workers)

    def describe_placement(self, placement: Placement) -> str:
        """Return the placement of a run's processes for display, one line per node."""
        return "\n".join(
            f"{address}: trainers {trainers}, engines {engines}, {counted(self.workers(node), 'verifier')}"
            for node, (address, trainers, engines) in zip(placement.nodes, placement.rows(), strict=True)
        )

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        """See `WorkerPool.submit`."""
        with self._actors.lock:
            actor = self._least_busy()
            if actor is not None:
                return self._actors.submit(actor, target, arguments)
            self._own_open += 1
        outcome = self._driver_pool.submit(target, arguments)
        outcome.add_done_callback(self._count_own)
        return outcome

    def _least_busy(self) -> NodeActor | None:
        """Return the node with the fewest waiting calls per worker. None is the driver's, which is preferred,
        since nothing has to be sent."""
        actors = [actor for actor in self._actors.all if actor.takes_calls]
        least = min(actors, key=lambda actor: len(actor.open) / actor.workers, default=None)
        if least is None or self._own_open // self._own_workers <= len(least.open) // least.workers:
            return None
        return least

    def _count_own(self, _: Future[Outcome]) -> None:
        with self._actors.lock:
            self._own_open -= 1

    def _ask_elsewhere(self, _: NodeActor, orphans: list[Call]) -> None:
        for call in orphans:
            if not call.outcome.cancelled():
                self.submit(*call.arguments).add_done_callback(partial(_hand_on, call.outcome))


def _hand_on(to: Future[Outcome], done: Future[Outcome]) -> None:
    """Copy the result of `done` to `to`."""
    if done.cancelled():
        to.cancel()
    elif to.set_running_or_notify_cancel():
        if (error := done.exception()) is not None:
            to.set_exception(error)
        else:
            to.set_result(done.result())
