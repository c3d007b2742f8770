"""Engines that died: replaced while the others work, and given the present weights."""

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.cluster.engine_fleet import EngineFleet
from megatron_ibpo.cluster.engine_handles import Member, RemoteEngine
from megatron_ibpo.cluster.engine_processes import LOOK_EVERY_S, Reasons
from megatron_ibpo.engines import EngineError, EngineLostError

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
        """Count a death of the engine.

        Raises:
            EngineError: it was one too many.
        """
        now = time.monotonic()
        worked = 0.0 if member.since is None else now - member.since
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
