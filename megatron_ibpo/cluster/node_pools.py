"""Reward functions and episodes on every node of a run; each goes to the node with the shortest queue."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from megatron_ibpo.basics.text import counted
from megatron_ibpo.cluster.node_actors import Call, NodeActor, NodeObject, OnAllNodes
from megatron_ibpo.cluster.placement import Node, Placement
from megatron_ibpo.config import DataConfig, EnvironmentConfig
from megatron_ibpo.environments import EpisodeFaultError, EpisodeScore, Message, Opening, Session, Turn
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.rewards import Outcome, Pool, open_pool, worker_count


class NodePool(NodeObject):
    """The verifiers of a node (`open_pool`)."""

    def __init__(self, data: DataConfig, rm_types: Sequence[str]) -> None:
        super().__init__(open_pool(data, rm_types))

    def submit(self, number: int, target: str, arguments: tuple[Any, ...]) -> None:
        self.follow(number, self._pool.submit(target, arguments))


class Verifiers(OnAllNodes):
    """The worker processes of all nodes as one pool (`rewards.Pool`). Unfinished calls of a dead actor are
    made again elsewhere."""

    name, factory = "verifier", f"{__name__}:NodePool"

    def __init__(
        self, driver_pool: Pool, nodes: Sequence[Node], data: DataConfig, rm_types: Iterable[str] = ()
    ) -> None:
        """`rm_types` are verifiers that will be needed besides that of `data`."""
        self._own_open, self._own_workers = 0, worker_count(data)
        rm_types = tuple(rm_types)

        def of_node(node: Node) -> tuple[int, tuple[Any, ...]]:
            workers = worker_count(data, node.cpus)
            return workers, (replace(data, reward_workers=workers), rm_types)

        super().__init__(driver_pool, nodes, of_node)

    def workers(self, node: Node) -> int:
        """Return the number of verifier processes on a node of the run."""
        return next((actor.workers for actor in self.actors if actor.node == node), self._own_workers)

    def describe_placement(self, placement: Placement) -> str:
        """Return the placement of a run's processes for display, one line per node."""
        return "\n".join(
            f"{address}: trainers {trainers}, engines {engines}, {counted(self.workers(node), 'verifier')}"
            for node, (address, trainers, engines) in zip(placement.nodes, placement.rows(), strict=True)
        )

    def submit(self, target: str, arguments: tuple[Any, ...]) -> Future[Outcome]:
        """See `WorkerPool.submit`."""
        with self.lock:
            actor = self._least_busy()
            if actor is not None:
                return self.ask(actor, target, arguments)
            self._own_open += 1
        outcome = self.driver_pool.submit(target, arguments)
        outcome.add_done_callback(self._count_own)
        return outcome

    def _least_busy(self) -> NodeActor | None:
        """Return the node with the fewest waiting calls per worker. None is the driver's, which is preferred,
        since nothing has to be sent."""
        actors = [actor for actor in self.actors if actor.takes_calls]
        least = min(actors, key=lambda actor: len(actor.open) / actor.workers, default=None)
        if least is None or self._own_open // self._own_workers <= len(least.open) // least.workers:
            return None
        return least

    def _count_own(self, _: Future[Outcome]) -> None:
        with self.lock:
            self._own_open -= 1

    def settle(self, _: NodeActor, orphans: list[Call]) -> None:
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


Answer = tuple[str, Any]
"""("value", what a method returned) or ("fault", (kind, text)): a fault is not a failure of the actor."""


class NodeEnvironments(NodeObject):
    """The sessions of a node, in an event loop in a thread."""

    def __init__(self, config: EnvironmentConfig, targets: Sequence[str]) -> None:
        """Import the environments. Raises ConfigError as `EnvironmentPool.check`."""
        super().__init__(EnvironmentPool(config))
        for target in targets:
            self._pool.check(target)
        self._sessions: dict[int, Session] = {}
        self._calls: dict[int, asyncio.Task[Any]] = {}
        """Call in progress of each session."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    def submit(self, number: int, session: int, method: str, *arguments: Any) -> None:
        """Call a method of a session, or `open` of the pool; the outcome is an `Answer`."""
        answer = self._answer(session, method, arguments)
        self.follow(number, asyncio.run_coroutine_threadsafe(answer, self._loop))

    async def _answer(self, session: int, method: str, arguments: tuple[Any, ...]) -> Answer:
        if method == "close":
            await self._close(session)
            return "value", None
        self._calls[session] = cast("asyncio.Task[Any]", asyncio.current_task())
        try:
            if method == "open":
                self._sessions[session] = opened = await self._pool.open(*arguments)
                return "value", opened.opening
            return "value", await getattr(self._sessions[session], method)(*arguments)
        except EpisodeFaultError as fault:
            return "fault", (fault.kind, str(fault))
        except asyncio.CancelledError:  # its caller is no longer interested
            return "fault", ("death", "closed")
        finally:
            self._calls.pop(session, None)

    async def _close(self, session: int) -> None:
        if (call := self._calls.get(session)) is not None:
            call.cancel()
            await asyncio.wait([call])
        if (environment := self._sessions.pop(session, None)) is not None:
            await environment.close()


class Environments(OnAllNodes):
    """Places for episodes on all nodes (`protocol.Sessions`). The episodes of an actor that dies fail with
    it, and are played again."""

    name, factory = "environments", f"{__name__}:NodeEnvironments"

    def __init__(
        self,
        driver_pool: EnvironmentPool,
        nodes: Sequence[Node],
        config: EnvironmentConfig,
        targets: Sequence[str],
    ) -> None:
        """`targets` are the environments that are imported at the start."""
        arguments = config.environment_processes, (config, tuple(targets))
        super().__init__(driver_pool, nodes, lambda _: arguments)
        self._session_numbers = itertools.count()
        self.open_episodes: Counter[NodeActor] = Counter()
        """Episodes of each actor, those that wait for their turn too."""

    async def open(
        self, target: str, question: str, label: str, metadata: Mapping[str, Any], seed: int
    ) -> Session:
        """Begin an episode on the node with the fewest. See `protocol.Sessions`."""
        episode = target, question, label, dict(metadata), seed
        with self.lock:
            actor = self._least_busy()
            if actor is not None:
                session = NodeSession(self, actor, next(self._session_numbers))
        if actor is None:
            return await self.driver_pool.open(*episode)
        try:
            await session.begin(*episode)
        except BaseException:
            await session.close()
            raise
        return session

    def _least_busy(self) -> NodeActor | None:
        """Return the node with the fewest episodes. None is the driver's, which is preferred, since nothing
        has to be sent."""
        actors = [actor for actor in self.actors if actor.takes_calls]
        least = min(actors, key=lambda actor: self.open_episodes[actor], default=None)
        return None if least is None or self.driver_pool.open_now <= self.open_episodes[least] else least

    def settle(self, actor: NodeActor, orphans: list[Call]) -> None:
        for call in orphans:
            if call.outcome.set_running_or_notify_cancel():
                call.outcome.set_result(("fault", ("death", f"{actor.host.name}: its process died")))


class NodeSession:
    """An episode on another node (`protocol.Session`), with a number that names it to the actor."""

    def __init__(self, places: Environments, actor: NodeActor, number: int) -> None:
        self._places, self._actor, self._host, self._number = places, actor, actor.host, number
        places.open_episodes[actor] += 1  # until it is closed
        self._closed = False
        self._opening: Opening | None = None

    @property
    def opening(self) -> Opening:
        assert self._opening is not None
        return self._opening

    async def begin(self, *arguments: Any) -> None:
        """Open the episode, with the arguments of `protocol.Sessions.open`."""
        self._opening = await self._call("open", *arguments)

    async def step(self, message: Message) -> Turn:
        return await self._call("step", message)

    async def score(self) -> EpisodeScore:
        return await self._call("score")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(EpisodeFaultError):  # it has ended with its actor
                await self._call("close")
        finally:
            with self._places.lock:
                self._places.open_episodes[self._actor] -= 1

    async def _call(self, method: str, *arguments: Any) -> Any:
        with self._places.lock:
            if self._actor.host is not self._host or not self._actor.takes_calls:
                raise EpisodeFaultError("death", f"{method}: {self._host.name}: its process died")
            answer = self._places.ask(self._actor, self._number, method, *arguments)
        kind, content = await asyncio.wrap_future(answer)
        if kind == "fault":
            raise EpisodeFaultError(*content)
        return content
