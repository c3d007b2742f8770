"""The engines of a run: fed by the Sampler, updated with new weights, and replaced when they die while the
others work."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.cluster.engine_fleet import EngineFleet
from megatron_ibpo.cluster.engine_processes import (
    LOOK_EVERY_S,
    EngineProcesses,
    IdleEngine,
    Member,
    Reasons,
    RemoteEngine,
)
from megatron_ibpo.engines import EngineError, EngineLostError
from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.transfer.link import UpdateOrder

WITHIN_S = 60.0
"""Stop the run after MOST_DEATHS of one engine within this many seconds of work and one step. Start-up time
does not count, since it takes minutes for a large model."""

log = logging.getLogger(__name__)


@dataclass
class EngineRestarts:
    """The replacement of engines that died."""

    fleet: EngineFleet
    deaths: int = 0
    """Number of engines that died in this run."""
    count: int = 0
    """Number of processes started in their place."""
    trainers_lost: bool = False
    """True after a trainer died while engines joined and others sampled; they join once there are new
    trainers."""

    async def revive(self, index: int) -> RemoteEngine:
        """Replace a dead engine. The new one starts while all other work continues, or after engines that
        sleep are awake again, and joins when `admit` gives it the present weights.

        Raises:
            EngineError: the same engine died several times within a minute of work and one step.
            EngineLostError: there is no place for it now.
        """
        member = self.fleet.members[index]
        member.absent, member.join_future = True, None
        self.deaths += 1
        try:
            await self._its_turn(member)
            await self._up_again(member)
            member.join_future = join_future = Future[None]()
        finally:
            member.starting = False
        await asyncio.wrap_future(join_future)
        member.since = time.monotonic()
        return RemoteEngine(member)

    async def _its_turn(self, member: Member) -> None:
        """Wait while engines sleep or trainers send weights on shared GPUs, since a starting engine needs
        memory that the trainers then hold."""
        member.starting = True  # first: `sleep` and `send_weights` set theirs, then look for starting engines
        while self.fleet.order.sleeping or self.fleet.sending:
            member.starting = False
            await asyncio.sleep(LOOK_EVERY_S)
            member.starting = True

    async def _up_again(self, member: Member) -> None:
        while True:
            self._count_death(member)
            self.count += 1
            try:
                await asyncio.to_thread(self.fleet.processes.start_again, member)
                return
            except EngineLostError:
                raise
            except (EngineError, ProcessDiedError) as error:
                log.warning("engine %d did not start: %s", member.index, error)

    def _count_death(self, member: Member) -> None:
        """Count a death of the engine. Raises EngineError if it was one too many."""
        worked = 0.0 if member.since is None else time.monotonic() - member.since
        member.since = None
        member.deaths.append((self.fleet.order.version, worked))
        last = member.deaths[-MOST_DEATHS:]
        seconds = sum(worked for _, worked in last[1:])
        if len(last) == MOST_DEATHS and last[0][0] == self.fleet.order.version and seconds < WITHIN_S:
            log_file = self.fleet.processes.logs / f"engine_{member.index}.log"
            raise EngineError(
                f"engine {member.index} died {MOST_DEATHS} times within {seconds:.0f} seconds of work and "
                f"one step of the run: it is not started again; see {log_file}"
            )

    def admit(self) -> None:
        """Give restarted engines the present weights and let them join.

        Call it only while the trainers have the weights of the order's version and are idle.

        Raises:
            ProcessDiedError: a trainer died during this. If engines share the trainers' GPUs and some of them
                sample, the error is left to the next use of the trainers: new trainers would have no room
                beside these engines.
        """
        fleet = self.fleet
        ready = {
            member.index: member.join_future
            for member in fleet.members.values()
            if member.join_future is not None
        }
        if not ready:
            return
        if self.trainers_lost and fleet.alive:
            return
        if fleet.sleeps and fleet.any_starts:
            return  # trainers that send would take memory that its start needs: they join together
        dead: Reasons = {}
        may_sleep = fleet.sleeps  # restarted engines sleep with the others
        if fleet.order.version > 0 or may_sleep:  # otherwise it has the weights that it loaded
            for index in ready:
                fleet.members[index].connected = False
            try:
                _, _, dead = fleet.send_weights(sorted(ready), replace(fleet.order, sleeping=may_sleep))
            except ProcessDiedError as death:
                self._join_later(ready, death)
                return
        if may_sleep:
            fleet.order = replace(fleet.order, sleeping=False)  # also if no other engine was left
        fleet.processes.end(dead)
        for index, join_future in ready.items():
            member = fleet.members[index]
            member.absent, member.join_future = False, None
            join_future.set_result(None)
            if index not in dead:
                # a warning as its death was, so that both are seen
                log.warning("engine %d is back, with the weights of step %d", index, fleet.order.version)

    def _join_later(self, ready: Iterable[int], death: ProcessDiedError) -> None:
        """Postpone joining after a trainer died while engines joined; these may be awake by now."""
        if not self.fleet.sleeps:
            raise death
        self.fleet.processes.trainers.close()  # as in `update_weights`
        self.fleet.sleep_or_end(ready)
        if not self.fleet.alive:
            raise death
        self.trainers_lost = True
        log.warning("%s; the trainers restart once the engines have finished their requests", death)


class Engines:
    """All engines of a run, as the driver controls them."""

    def __init__(self, processes: EngineProcesses, order: UpdateOrder) -> None:
        """
        Args:
            order: settings of updates, and the version of the weights that the engines load.
        """
        self.fleet = EngineFleet(processes, order)
        self.restarts = EngineRestarts(self.fleet)

    def start(self) -> None:
        """Start the engines in their processes, once the trainers are located, and return at once."""
        for index in self.fleet.members:
            self.fleet.processes.build(index)

    def wait_ready(self) -> None:
        """Wait until every engine can take requests. Raises EngineStartError with the end of its log if one
        did not start."""
        self.fleet.processes.wait(self.fleet.members)
        ready_at = time.monotonic()
        for member in self.fleet.members.values():
            member.since = ready_at

    def meet_trainers(self) -> None:
        """Prepare trainers that have just started to send weights; they are connected to no engine yet."""
        for member in self.fleet.members.values():
            member.deaths.clear()  # not its fault if a trainer that sent it weights died
        processes = self.fleet.processes
        transport, settings = TRANSPORTS[processes.settings.transport], processes.settings
        processes.trainers.call_all("open_transport", transport, settings.drafts_with_mtp)
        for member in self.fleet.members.values():
            member.connected = False
        self.restarts.trainers_lost = False

    @property
    def prefix_caching(self) -> bool:
        return self.fleet.processes.settings.prefix_caching

    @property
    def reproducible(self) -> bool:
        # on GPUs vLLM's core starts with the first request to reach it
        return self.fleet.processes.settings.device == "cpu"

    def clients(self) -> list[RemoteEngine]:
        """Return the engines for the sampler, by index."""
        return [RemoteEngine(self.fleet.members[index]) for index in sorted(self.fleet.members)]

    @property
    def version(self) -> int:
        """Version of the weights that the engines sample with."""
        return self.fleet.order.version

    @property
    def count(self) -> int:
        """Total number of engines."""
        return len(self.fleet.members)

    @property
    def alive(self) -> int:
        """Number of engines that can take requests, without those being restarted or given up."""
        return self.fleet.alive

    def sleep(self) -> None:
        """Release the memory of engines on the trainers' GPUs, weights included; `wake` or an update wakes
        them.

        All of them have released it when this returns: an engine that does not is ended, since its memory is
        needed. No-op for other engines: an idle engine uses no processor.
        """
        if not self.fleet.order.sleeping and self.fleet.sleeps:
            # first, so that no engine is started from now on
            self.fleet.order = replace(self.fleet.order, sleeping=True)
            self.fleet.sleep_all()

    def wake(self) -> None:
        """Let sleeping engines sample again. They have dropped their weights, and load them again from the
        trainers, which still have those of `version`.

        Raises as `update_weights`.
        """
        if self.fleet.order.sleeping:
            self.update_weights(self.version)

    def update_weights(self, version: int) -> dict[str, float]:
        """Send the trainers' weights to all engines as policy `version`, wake the engines, and clear their
        caches.

        Returns:
            weight_update_seconds, weight_update_bytes (to all workers of all engines),
            weight_update_bytes_ratio (those bytes over the size of the workers' shards), and with speculative
            decoding draft_acceptance (accepted share of the tokens drafted since the last update).

        Raises:
            WeightPlanError: the trainers' tensors are not those that the engines load.
            WeightMismatchError: with --check-weight-update-equal, other bytes arrived than were sent.
            ProcessDiedError: a trainer died during the update; engines that slept before sleep again.
        """
        began, fleet = time.monotonic(), self.fleet
        fleet.order = replace(fleet.order, version=version)
        present = {member.index: member.host for member in fleet.present}
        try:
            sent, needed, failures = fleet.send_weights(list(present), fleet.order)
        except ProcessDiedError:
            if fleet.order.sleeping:  # some are awake, and trainers train again before the next attempt
                fleet.processes.trainers.close()  # survivors in this pass would take memory that engines free
                fleet.sleep_all()
            raise
        fleet.order = replace(fleet.order, sleeping=False)
        # the sampler may have found the death first, and its replacement must not be ended
        dead = {i: reason for i, reason in failures.items() if fleet.members[i].host is present[i]}
        if dead:
            log.warning("\n".join(f"engine {index} died: {reason}" for index, reason in dead.items()))
        fleet.processes.end(dead)  # the sampler finds them dead, and has them replaced
        self.admit()
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(sent),
            "weight_update_bytes_ratio": sent / needed if needed else 1.0,
        } | fleet.draft_acceptance()

    async def revive(self, index: int) -> RemoteEngine:
        """Replace a dead engine (`EngineRestarts.revive`)."""
        return await self.restarts.revive(index)

    def admit(self) -> None:
        """Give restarted engines the present weights and let them join (`EngineRestarts.admit`)."""
        self.restarts.admit()

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[IdleEngine]:
        """Provide a fresh engine with the weights of `hf_dir` as version 0, in place of a living one. It
        stays, and gets the current weights at the end."""
        self.fleet.processes.start_fresh(index, hf_dir)
        yield self.idle(index)
        _, _, dead = self.fleet.send_weights([index], self.fleet.order)
        self.fleet.processes.end(dead)

    def idle(self, index: int) -> IdleEngine:
        """Return one engine for the caller's exclusive use."""
        return IdleEngine(self.fleet.members[index].host)

    def close(self) -> None:
        """Stop all engines, whatever state they are in; nothing of them remains."""
        self.fleet.processes.stop(self.fleet.members)
        self.fleet.members.clear()
