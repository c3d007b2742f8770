"""The engines of a run: fed by the Sampler, updated with new weights, replaced when they die."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.cluster.engine_handles import IdleEngine, Member, RemoteEngine
from megatron_ibpo.cluster.engine_processes import LOOK_EVERY_S, EngineProcesses, Reasons
from megatron_ibpo.cluster.engine_updates import catch_up, draft_acceptance
from megatron_ibpo.engines import EngineError, EngineLostError
from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.transfer.update_order import UpdateOrder

WITHIN_S = 60.0
"""Stop the run after MOST_DEATHS of one engine within this many seconds of work and one step. Start-up time
does not count, since it takes minutes for a large model."""

log = logging.getLogger(__name__)


@dataclass
class Engines:
    """All engines of a run, as the driver controls them."""

    processes: EngineProcesses
    order: UpdateOrder
    """Settings of the next update."""
    died: int = 0
    """Number of engines that died in this run."""
    restarts: int = 0
    """Number of processes started in their place."""
    sending: bool = False
    """True while trainers hold their weights on GPUs that they share with engines, to send them."""
    trainers_lost: bool = False
    """True after a trainer died while engines joined and others sampled; they join once there are new
    trainers."""

    @property
    def members(self) -> dict[int, Member]:
        """The engines by index."""
        return self.processes.members

    @property
    def sleeps(self) -> bool:
        """True if engines sleep while trainers use their GPUs."""
        return self.processes.settings.sleep_mode

    def start(self) -> None:
        """Start the engines in their processes, once the trainers are located, and return at once."""
        for index in self.members:
            self.processes.build(index)

    def wait_ready(self) -> None:
        """Wait until every engine can take requests.

        Raises:
            EngineStartError: one did not start; with the end of its log.
        """
        self.processes.wait(self.members)
        now = time.monotonic()
        for member in self.members.values():
            member.since = now

    def meet_trainers(self) -> None:
        """Prepare trainers that have just started to send weights; they are connected to no engine yet."""
        for member in self.members.values():
            member.deaths.clear()  # not its fault if a trainer that sent it weights died
        transport = TRANSPORTS[self.processes.settings.transport]
        self.processes.trainers.all("open_transport", transport)
        for member in self.members.values():
            member.connected = False
        self.trainers_lost = False

    @property
    def prefix_caching(self) -> bool:
        return self.processes.settings.prefix_caching

    @property
    def reproducible(self) -> bool:
        # on GPUs vLLM's core starts with the first request to reach it
        return self.processes.settings.device == "cpu"

    def clients(self) -> list[RemoteEngine]:
        """Return the engines for the sampler, by index."""
        return [RemoteEngine(self.members[index]) for index in sorted(self.members)]

    @property
    def version(self) -> int:
        """Version of the weights that the engines sample with."""
        return self.order.version

    @property
    def count(self) -> int:
        """Total number of engines."""
        return len(self.members)

    @property
    def alive(self) -> int:
        """Number of engines that can take requests, without those being restarted or given up."""
        return sum(not member.absent for member in self.members.values())

    def sleep(self) -> None:
        """Release the memory of engines on the trainers' GPUs, weights included; `wake` or an update wakes
        them.

        All of them have released it when this returns: an engine that does not is ended, since its memory is
        needed. No-op for other engines: an idle engine uses no processor.
        """
        if not self.order.sleeping and self.sleeps:
            self.order = replace(self.order, sleeping=True)  # first, so that no engine is started from now on
            self._lay_to_sleep()

    def wake(self) -> None:
        """Let sleeping engines sample again. They have dropped their weights, and load them again from the
        trainers, which still have those of `version`.

        Raises as `update_weights`.
        """
        if self.order.sleeping:
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
        began = time.monotonic()
        self.order = replace(self.order, version=version)
        present = {member.index: member.host for member in self._present}
        try:
            sent, needed, found_dead = self._catch_up(list(present), self.order)
        except ProcessDiedError:
            if self.order.sleeping:  # some are awake, and trainers train again before the next attempt
                self.processes.trainers.close()  # survivors in this pass would take memory that engines free
                self._lay_to_sleep()
            raise
        self.order = replace(self.order, sleeping=False)
        # the sampler may have found the death first, and its replacement must not be ended
        dead = {index: why for index, why in found_dead.items() if self.members[index].host is present[index]}
        if dead:
            log.warning("\n".join(f"engine {index} died: {reason}" for index, reason in dead.items()))
        self.processes.end(dead)  # the sampler finds them dead, and has them replaced
        self.admit()
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(sent),
            "weight_update_bytes_ratio": sent / needed if needed else 1.0,
        } | draft_acceptance(self.processes, self._present, self.order.timeout)

    async def revive(self, index: int) -> RemoteEngine:
        """Replace a dead engine. The new one starts while all other work continues, or after engines that
        sleep are awake again, and joins when `admit` gives it the present weights.

        Raises:
            EngineError: the same engine died several times within a minute of work and one step.
            EngineLostError: there is no place for it now.
        """
        member = self.members[index]
        member.absent, member.joined = True, None
        self.died += 1
        try:
            await self._its_turn(member)
            await self._up_again(member)
            member.joined = joined = Future[None]()
        finally:
            member.starting = False
        await asyncio.wrap_future(joined)
        member.since = time.monotonic()
        return RemoteEngine(member)

    async def _its_turn(self, member: Member) -> None:
        """Wait while engines sleep or trainers send weights on shared GPUs, since a starting engine needs
        memory that the trainers then hold."""
        member.starting = True  # first: `sleep` and `_sending` set theirs, then look for starting engines
        while self.order.sleeping or self.sending:
            member.starting = False
            await asyncio.sleep(LOOK_EVERY_S)
            member.starting = True

    async def _up_again(self, member: Member) -> None:
        while True:
            self._count_death(member)
            self.restarts += 1
            try:
                await asyncio.to_thread(self.processes.start_again, member)
                return
            except EngineLostError:
                raise
            except (EngineError, ProcessDiedError) as error:
                log.warning("engine %d did not start: %s", member.index, error)

    def admit(self) -> None:
        """Give restarted engines the present weights and let them join.

        Call it only while the trainers have the weights of `version` and are idle.

        Raises:
            ProcessDiedError: a trainer died during this. If engines share the trainers' GPUs and some of them
                sample, the error is left to the next use of the trainers: new trainers would have no room
                beside these engines.
        """
        ready = {member.index: member.joined for member in self.members.values() if member.joined is not None}
        if not ready:
            return
        if self.trainers_lost and self.alive:
            return
        if self.sleeps and self._any_starts:
            return  # trainers that send would take memory that its start needs: they join together
        dead: Reasons = {}
        may_sleep = self.sleeps  # restarted engines sleep with the others
        if self.version > 0 or may_sleep:  # otherwise it has the weights that it loaded
            for index in ready:
                self.members[index].connected = False
            try:
                _, _, dead = self._catch_up(sorted(ready), replace(self.order, sleeping=may_sleep))
            except ProcessDiedError as death:
                self._join_later(ready, death)
                return
        if may_sleep:
            self.order = replace(self.order, sleeping=False)  # also if no other engine was left
        self.processes.end(dead)
        for index, joined in ready.items():
            member = self.members[index]
            member.absent, member.joined = False, None
            joined.set_result(None)
            if index not in dead:
                # a warning as its death was, so that both are seen
                log.warning("engine %d is back, with the weights of step %d", index, self.version)

    def _join_later(self, ready: Iterable[int], death: ProcessDiedError) -> None:
        """Postpone joining after a trainer died while engines joined; these may be awake by now."""
        if not self.sleeps:
            raise death
        self.processes.trainers.close()  # as in `update_weights`
        self._sleep_or_end(ready)
        if not self.alive:
            raise death
        self.trainers_lost = True
        log.warning("%s; the trainers restart once the engines have finished their requests", death)

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[IdleEngine]:
        """Provide a fresh engine with the weights of `hf_dir` as version 0, in place of a living one. It
        stays, and gets the current weights at the end."""
        self.processes.start_fresh(index, hf_dir)
        yield self.idle(index)
        _, _, dead = self._catch_up([index], self.order)
        self.processes.end(dead)

    def idle(self, index: int) -> IdleEngine:
        """Return one engine for the caller's exclusive use."""
        return IdleEngine(self.members[index].host)

    def close(self) -> None:
        """Stop all engines, whatever state they are in; nothing of them remains."""
        self.processes.stop(self.members)
        self.members.clear()

    def _catch_up(self, engines: list[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Do what `catch_up` does, while no engine on the trainers' GPUs starts."""
        with self._sending():
            return catch_up(self.processes, engines, order)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Keep engines on the trainers' GPUs from starting within the context."""
        self.sending = self.sleeps
        if self.sending:
            self._wait_for_starts()
        try:
            yield
        finally:
            self.sending = False

    def _count_death(self, member: Member) -> None:
        """Count a death of the engine.

        Raises:
            EngineError: it was one too many.
        """
        now = time.monotonic()
        worked = 0.0 if member.since is None else now - member.since
        member.since = None
        member.deaths.append((self.version, worked))
        last = member.deaths[-MOST_DEATHS:]
        seconds = sum(worked for _, worked in last[1:])
        if len(last) == MOST_DEATHS and last[0][0] == self.version and seconds < WITHIN_S:
            log_file = self.processes.logs / f"engine_{member.index}.log"
            raise EngineError(
                f"engine {member.index} died {MOST_DEATHS} times within {seconds:.0f} seconds of work and "
                f"one step of the run: it is not started again; see {log_file}"
            )

    def _lay_to_sleep(self) -> None:
        self._wait_for_starts()
        self._sleep_or_end(self._up)

    @property
    def _any_starts(self) -> bool:
        return any(member.starting for member in self.members.values())

    def _wait_for_starts(self) -> None:
        """Wait until no engine is starting, since trainers need the memory. Each start has a time-out."""
        while self._any_starts:
            time.sleep(LOOK_EVERY_S)

    def _sleep_or_end(self, engines: Iterable[int]) -> None:
        failed = self.processes.tell(engines, "sleep", self.order.timeout)
        if failed:
            log.warning(
                "%s", "\n".join(f"engine {index} did not sleep: {why}" for index, why in failed.items())
            )
        self.processes.end(failed)  # the sampler finds them dead, and has them replaced

    @property
    def _present(self) -> list[Member]:
        """Engines that can take requests, in order."""
        return [self.members[index] for index in sorted(self.members) if not self.members[index].absent]

    @property
    def _up(self) -> list[int]:
        """Engines that were started, whether they have joined or not."""
        members = self.members
        return [index for index in sorted(members) if not members[index].absent or members[index].joined]
