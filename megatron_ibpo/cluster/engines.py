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
class Engines:
    """All engines of a run, as the driver controls them."""

    processes: EngineProcesses
    order: UpdateOrder
    """Settings of the next update, and the version of the weights that the engines have."""
    deaths: int = 0
    """Number of engines that died in this run."""
    restarts: int = 0
    """Number of processes started in their place."""
    _sending: bool = False
    """True while trainers hold their weights on GPUs that they share with engines, to send them."""
    _trainers_lost: bool = False
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

    @property
    def prefix_caching(self) -> bool:
        return self.processes.settings.prefix_caching

    @property
    def reproducible(self) -> bool:
        # on GPUs vLLM's core starts with the first request to reach it
        return self.processes.settings.device == "cpu"

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
        return len(self._present)

    @property
    def _present(self) -> list[int]:
        return [index for index in sorted(self.members) if not self.members[index].absent]

    @property
    def _any_starts(self) -> bool:
        return any(member.starting for member in self.members.values())

    def start(self) -> None:
        """Start the engines in their processes, once the trainers are located, and return at once."""
        for index in self.members:
            self.processes.build(index)

    def wait_ready(self) -> None:
        """Wait until every engine can take requests. Raises EngineStartError with the end of its log if one
        did not start."""
        self.processes.wait(self.members)
        ready_at = time.monotonic()
        for member in self.members.values():
            member.since = ready_at

    def meet_trainers(self) -> None:
        """Prepare trainers that have just started to send weights; they are connected to no engine yet."""
        settings = self.processes.settings
        for member in self.members.values():
            member.deaths.clear()  # not its fault if a trainer that sent it weights died
            member.connected = False
        self.processes.trainers.call_all(
            "open_transport", TRANSPORTS[settings.transport], settings.drafts_with_mtp
        )
        self._trainers_lost = False

    def clients(self) -> list[RemoteEngine]:
        """Return the engines for the sampler, by index."""
        return [RemoteEngine(self.members[index]) for index in sorted(self.members)]

    def idle(self, index: int) -> IdleEngine:
        """Return one engine for the caller's exclusive use."""
        return IdleEngine(self.members[index].host)

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[IdleEngine]:
        """Provide a fresh engine with the weights of `hf_dir` as version 0, in place of a living one. It
        stays, and gets the current weights at the end."""
        self.processes.start_fresh(index, hf_dir)
        yield self.idle(index)
        _, _, dead = self._send_weights([index], self.order)
        self.processes.end(dead)

    def close(self) -> None:
        """Stop all engines, whatever state they are in; nothing of them remains."""
        self.processes.stop(self.members)
        self.members.clear()

    # ------------------------------------------------------------------------------ sleep and weight updates

    def sleep(self) -> None:
        """Release the memory of engines on the trainers' GPUs, weights included; `wake` or an update wakes
        them.

        All of them have released it when this returns: an engine that does not is ended, since its memory is
        needed. No-op for other engines: an idle engine uses no processor.
        """
        if not self.order.sleeping and self.sleeps:
            # first, so that no engine is started from now on
            self.order = replace(self.order, sleeping=True)
            self._sleep_all()

    def wake(self) -> None:
        """Let sleeping engines sample again. They have dropped their weights, and load them again from the
        trainers, which still have those of `version`. Raises as `update_weights`."""
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
        hosts = {index: self.members[index].host for index in self._present}
        try:
            sent, needed, failures = self._send_weights(hosts, self.order)
        except ProcessDiedError:
            if self.order.sleeping:  # some are awake, and trainers train again before the next attempt
                self.processes.trainers.close()  # survivors in this pass would take memory that engines free
                self._sleep_all()
            raise
        self.order = replace(self.order, sleeping=False)
        # the sampler may have found the death first, and its replacement must not be ended
        dead = {i: reason for i, reason in failures.items() if self.members[i].host is hosts[i]}
        if dead:
            log.warning("\n".join(f"engine {index} died: {reason}" for index, reason in dead.items()))
        self.processes.end(dead)  # the sampler finds them dead, and has them replaced
        self.admit()
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(sent),
            "weight_update_bytes_ratio": sent / needed if needed else 1.0,
        } | self._draft_acceptance()

    def _send_weights(self, engines: Iterable[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Give `engines` the trainers' weights, as `EngineProcesses.send_weights` does, while no engine on
        their GPUs starts."""
        self._sending = self.sleeps
        if self._sending:
            self._wait_for_starts()
        try:
            return self.processes.send_weights(engines, order)
        finally:
            self._sending = False

    def _draft_acceptance(self) -> dict[str, float]:
        """Return the share of drafted tokens that engines accepted since the last call; empty if they draft
        none."""
        if not self.processes.settings.drafts:
            return {}
        counts, _ = self.processes.call_each(self._present, "drafts", self.order.timeout)
        drafted = sum(number for number, _ in counts.values())
        accepted = sum(number for _, number in counts.values())
        return {"draft_acceptance": accepted / drafted} if drafted else {}

    def _sleep_all(self) -> None:
        """Let all engines that were started sleep, whether they have joined or not."""
        self._wait_for_starts()
        started = [i for i, member in self.members.items() if not member.absent or member.join_future]
        self._sleep_or_end(sorted(started))

    def _sleep_or_end(self, engines: Iterable[int]) -> None:
        """Let engines sleep; end those that do not, since their memory is needed."""
        _, failed = self.processes.call_each(engines, "sleep", self.order.timeout)
        if failed:
            log.warning("\n".join(f"engine {index} did not sleep: {text}" for index, text in failed.items()))
        self.processes.end(failed)  # the sampler finds them dead, and has them replaced

    def _wait_for_starts(self) -> None:
        """Wait until no engine is starting, since trainers need the memory. Each start has a time-out."""
        while self._any_starts:
            time.sleep(LOOK_EVERY_S)

    # ---------------------------------------------------------------------------- engines that have died

    async def revive(self, index: int) -> RemoteEngine:
        """Replace a dead engine. The new one starts while all other work continues, or after engines that
        sleep are awake again, and joins when `admit` gives it the present weights.

        Raises:
            EngineError: the same engine died several times within a minute of work and one step.
            EngineLostError: there is no place for it now.
        """
        member = self.members[index]
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
        member.starting = True  # first: `sleep` and updates set theirs, then look for starting engines
        while self.order.sleeping or self._sending:
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

    def _count_death(self, member: Member) -> None:
        """Count a death of the engine. Raises EngineError if it was one too many."""
        worked = 0.0 if member.since is None else time.monotonic() - member.since
        member.since = None
        member.deaths.append((self.version, worked))
        last = member.deaths[-MOST_DEATHS:]
        seconds = sum(worked for _, worked in last[1:])
        if len(last) == MOST_DEATHS and last[0][0] == self.version and seconds < WITHIN_S:
            raise EngineError(
                f"engine {member.index} died {MOST_DEATHS} times within {seconds:.0f} seconds of work and "
                f"one step of the run: it is not started again; see {self.processes.log_of(member.index)}"
            )

    def admit(self) -> None:
        """Give restarted engines the present weights and let them join.

        Call it only while the trainers have the weights of the order's version and are idle.

        Raises:
            ProcessDiedError: a trainer died during this. If engines share the trainers' GPUs and some of them
                sample, the error is left to the next use of the trainers: new trainers would have no room
                beside these engines.
        """
        ready = {
            i: member.join_future for i, member in self.members.items() if member.join_future is not None
        }
        if not ready or (self._trainers_lost and self.alive):
            return
        if self.sleeps and self._any_starts:
            return  # trainers that send would take memory that its start needs: they join together
        dead: Reasons = {}
        if self.version > 0 or self.sleeps:  # otherwise it has the weights that it loaded
            for index in ready:
                self.members[index].connected = False
            # restarted engines sleep with the others
            order = replace(self.order, sleeping=self.sleeps)
            try:
                _, _, dead = self._send_weights(sorted(ready), order)
            except ProcessDiedError as death:
                self._join_later(ready, death)
                return
        if self.sleeps:
            self.order = replace(self.order, sleeping=False)  # also if no other engine was left
        self.processes.end(dead)
        for index, join_future in ready.items():
            member = self.members[index]
            member.absent, member.join_future = False, None
            join_future.set_result(None)
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
        self._trainers_lost = True
        log.warning("%s; the trainers restart once the engines have finished their requests", death)
