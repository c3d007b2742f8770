"""The engines of a run: started, fed by the Sampler, updated with new weights, replaced when they die."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from megatron_ibpo.cluster.actor import Host, gather, in_bundle, result
from megatron_ibpo.cluster.deaths import MOST_DEATHS, ProcessDiedError
from megatron_ibpo.cluster.engine_handles import (
    END_TIMEOUT_S,
    SLACK_S,
    IdleEngine,
    Member,
    RemoteEngine,
    RemoteLink,
)
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.cluster.reservation import lost_nodes
from megatron_ibpo.cluster.trainers import START_TIMEOUT_S, Trainers
from megatron_ibpo.engines import EngineError, EngineLostError
from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.engines.settings import EngineSettings
from megatron_ibpo.weights.transfer.update_order import UpdateOrder

WITHIN_S = 60.0
"""Stop the run after MOST_DEATHS of one engine within this many seconds of work and one step. Start-up time
does not count, since it takes minutes for a large model."""
CLOSE_TIMEOUT_S = 45.0
"""Seconds for an engine to stop in order: somewhat more than twice the time that it gives vLLM itself."""
FACTORY = "megatron_ibpo.engines.registry:start_engine"
CALLS_AT_ONCE = 8
"""Concurrent calls of an engine: one waits for samples while others submit, abort or kill."""
LOOK_EVERY_S = 0.1
"""Seconds between looks at engines that are starting."""
Reasons = dict[int, str]
"""Index of an engine → why it died."""

log = logging.getLogger(__name__)


@dataclass
class Engines:
    """All engines of a run, as the driver controls them."""

    trainers: Trainers
    placement: Placement
    group: PlacementGroup
    engine: str
    """Name or import path of the engine (--rollout-backend)."""
    settings: EngineSettings
    """Settings of each engine; its GPUs are filled in."""
    logs: Path
    order: UpdateOrder
    """Settings of the next update."""
    start_timeout: float
    """Seconds that an engine may take to start."""
    died: int = 0
    """Number of engines that died in this run."""
    restarts: int = 0
    """Number of processes started in their place."""
    members: dict[int, Member] = field(default_factory=dict)
    """The engines by index."""
    sending: bool = False
    """True while trainers hold their weights on GPUs that they share with engines, to send them."""
    trainers_lost: bool = False
    """True after a trainer died while engines joined and others sampled; they join once there are new
    trainers."""

    def launch(self) -> None:
        """Start the processes that will run the engines, without waiting."""
        for index in range(len(self.placement.engines)):
            self.members[index] = Member(index, self._host(index))

    def main_memory(self) -> dict[int, int]:
        """Return the bytes on each node that has engines and no trainers, by its index in the placement.

        Raises:
            ProcessDiedError: a process did not start.
        """
        with_trainers = {slot.node for slot in self.placement.trainers}
        slots = self.placement.engines
        own = {slot.node: index for index, slot in enumerate(slots) if slot.node not in with_trainers}
        asked = [self.members[index].host for index in own.values()]
        found = gather([host.where() for host in asked], [host.name for host in asked], START_TIMEOUT_S)
        return {node: where.memory for node, where in zip(own, found, strict=True)}

    def start(self) -> None:
        """Start the engines in their processes, once the trainers are located, and return at once."""
        for index in self.members:
            self._build(index)

    def wait_ready(self) -> None:
        """Wait until every engine can take requests.

        Raises:
            EngineStartError: one did not start; with the end of its log.
        """
        self._wait(self.members)
        now = time.monotonic()
        for member in self.members.values():
            member.since = now

    def meet_trainers(self) -> None:
        """Prepare trainers that have just started to send weights; they are connected to no engine yet."""
        for member in self.members.values():
            member.deaths.clear()  # not its fault if a trainer that sent it weights died
        self.trainers.all("open_transport", TRANSPORTS[self.settings.transport])
        for member in self.members.values():
            member.connected = False
        self.trainers_lost = False

    @property
    def prefix_caching(self) -> bool:
        return self.settings.prefix_caching

    @property
    def reproducible(self) -> bool:
        return self.settings.device == "cpu"  # on GPUs vLLM's core starts with the first request to reach it

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
        if not self.order.sleeping and self.settings.sleep_mode:
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
                self.trainers.close()  # survivors in this pass would take memory that engines free
                self._lay_to_sleep()
            raise
        self.order = replace(self.order, sleeping=False)
        # the sampler may have found the death first, and its replacement must not be ended
        dead = {index: why for index, why in found_dead.items() if self.members[index].host is present[index]}
        if dead:
            log.warning("\n".join(f"engine {index} died: {reason}" for index, reason in dead.items()))
        self._end(dead)  # the sampler finds them dead, and has them replaced
        self.admit()
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(sent),
            "weight_update_bytes_ratio": sent / needed if needed else 1.0,
        } | self._drafts()

    def _drafts(self) -> dict[str, float]:
        """Return the share of drafted tokens that engines accepted since the last call. An engine that dies
        during the call is noticed when it is next used."""
        if "speculative_config" not in self.settings.extra_arguments:
            return {}
        hosts = [member.host for member in self._present]
        asked = [(host, host.call("call", "drafts", timeout=self.order.timeout)) for host in hosts]
        drafted = accepted = 0
        for host, answer in asked:
            try:
                counts = result(answer, host.name, self.order.timeout + SLACK_S)
            except (EngineError, ProcessDiedError) as error:
                log.debug("%s: %s", host.name, error)
                continue
            drafted, accepted = drafted + counts[0], accepted + counts[1]
        return {"draft_acceptance": accepted / drafted} if drafted else {}

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
                await asyncio.to_thread(self._start_again, member)
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
                    beside
                these engines.
        """
        ready = {member.index: member.joined for member in self.members.values() if member.joined is not None}
        if not ready:
            return
        if self.trainers_lost and self.alive:
            return
        if self.settings.sleep_mode and self._any_starts:
            return  # trainers that send would take memory that its start needs: they join together
        dead: Reasons = {}
        may_sleep = self.settings.sleep_mode  # restarted engines sleep with the others
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
        self._end(dead)
        for index, joined in ready.items():
            member = self.members[index]
            member.absent, member.joined = False, None
            joined.set_result(None)
            if index not in dead:
                # a warning as its death was, so that both are seen
                log.warning("engine %d is back, with the weights of step %d", index, self.version)

    def _join_later(self, ready: Iterable[int], death: ProcessDiedError) -> None:
        """Postpone joining after a trainer died while engines joined; these may be awake by now."""
        if not self.settings.sleep_mode:
            raise death
        self.trainers.close()  # as in `update_weights`
        self._sleep_or_end(ready)
        if not self.alive:
            raise death
        self.trainers_lost = True
        log.warning("%s; the trainers restart once the engines have finished their requests", death)

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[IdleEngine]:
        """Provide a fresh engine with the weights of `hf_dir` as version 0, in place of a living one. It
        stays, and gets the current weights at the end."""
        self._stop([index])
        self.members[index].replaced_by(self._host(index))
        self._build(index, hf_dir)
        self._wait([index])
        yield self.idle(index)
        _, _, dead = self._catch_up([index], self.order)
        self._end(dead)

    def idle(self, index: int) -> IdleEngine:
        """Return one engine for the caller's exclusive use."""
        return IdleEngine(self.members[index].host)

    def close(self) -> None:
        """Stop all engines, whatever state they are in; nothing of them remains."""
        self._stop(self.members)
        self.members.clear()

    def _host(self, index: int) -> Host:
        placement = self.placement
        bundle = placement.partners[index][0] if placement.colocated else len(placement.trainers) + index
        return Host(
            f"engine {index}",
            in_bundle(self.group, bundle),
            gpus=placement.engines[index].gpus,
            threads=CALLS_AT_ONCE,
            environment={},
        )

    def _build(self, index: int, hf_dir: Path | None = None, *, again: bool = False) -> None:
        placement = self.placement
        gpus = self.trainers.gpus(placement.partners[index]) if placement.colocated else ()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        count = len(gpus) or placement.engines[index].gpus
        settings = replace(self.settings, gpus=tuple(range(count)), model=str(hf_dir or self.settings.model))
        if placement.spans_nodes(index):  # never run so far: it needs nodes with GPUs
            extra = {**settings.extra_arguments, "distributed_executor_backend": "ray"}
            settings = replace(settings, extra_arguments=extra)
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        path = self.logs / f"engine_{index}.log"
        self.members[index].host.build(FACTORY, environment, self.engine, settings, path, again)

    def _stop(self, engines: Iterable[int]) -> None:
        """End these engines' processes, whatever state they are in."""
        self._finish(engines, CLOSE_TIMEOUT_S, "close")

    def _wait(self, engines: Iterable[int]) -> None:
        hosts = [self.members[index].host for index in engines]
        names = [host.name for host in hosts]
        gather([host.built for host in hosts], names)  # calls run in threads, and none may overtake this one
        gather([host.call("wait_ready", self.start_timeout) for host in hosts], names)

    def _catch_up(self, engines: Sequence[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Give `engines` the current weights according to `order`, in a second pass to those that fail in the
        first: a living engine can take part again, and a dead one answers so at once. Return (bytes sent,
        bytes of their shards, engines that failed twice)."""
        with self._sending():
            sent, needed, failed = self._pass(engines, order)
            if not failed:
                return sent, needed, {}
            log.warning(
                "\n".join(f"engine {index} has no weights yet: {why}" for index, why in failed.items())
            )
            sent_again, needed_again, failed = self._pass(sorted(failed), order)
            return sent + sent_again, needed + needed_again, failed

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Keep engines on the trainers' GPUs from starting within the context."""
        self.sending = self.settings.sleep_mode
        if self.sending:
            self._wait_for_starts()
        try:
            yield
        finally:
            self.sending = False

    def _pass(self, engines: Sequence[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Connect the trainers to those of `engines` that are new to them, and send the weights to all.
        Return as `_catch_up`."""
        ranks = range(len(self.placement.trainers))
        strangers = [index for index in engines if not self.members[index].connected]
        dead: Reasons = {}
        if strangers:
            asked = [(self._links(rank, strangers), strangers) for rank in ranks]
            dead = self._reasons(self.trainers.each("connect", asked))
            for index in strangers:
                self.members[index].connected = index not in dead
        present = [index for index in engines if index not in dead]
        if not present:
            return 0, 0, dead
        orders = [(self._links(rank, present), present, order) for rank in ranks]
        passes = self.trainers.each("send", orders)
        dead |= self._reasons([done.failures for done in passes])
        for index in dead:
            self.members[index].connected = False
        return sum(done.num_bytes for done in passes), passes[0].needed_bytes, dead

    def _links(self, rank: int, engines: Sequence[int]) -> dict[int, RemoteLink]:
        """Return the engines that this rank is connected to."""
        owners = self.placement.owners
        return {index: RemoteLink(self.members[index].host) for index in engines if owners[index] == rank}

    def _reasons(self, parts: Sequence[Mapping[int, str]]) -> Reasons:
        """Return every engine that a rank found dead; its owner knows the reason best."""
        owners = self.placement.owners
        reasons: Reasons = {}
        for rank, part in enumerate(parts):
            for index, reason in part.items():
                if index not in reasons or owners[index] == rank:
                    reasons[index] = reason
        return reasons

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
            log_file = self.logs / f"engine_{member.index}.log"
            raise EngineError(
                f"engine {member.index} died {MOST_DEATHS} times within {seconds:.0f} seconds of work and "
                f"one step of the run: it is not started again; see {log_file}"
            )

    def _start_again(self, member: Member) -> None:
        """Start a new process for a dead engine and wait until it can take requests."""
        index = member.index
        log.warning("engine %d: starting it again", index)
        self._end([index])
        slot = self.placement.engines[index]
        if gone := lost_nodes(self.placement, [slot.node]):
            raise EngineLostError(f"engine {index} was lost with {gone[0]}")
        member.replaced_by(self._host(index))
        self._build(index, again=True)
        self._wait([index])

    def _end(self, engines: Iterable[int]) -> None:
        """End engines that died or failed, so that nothing of them remains."""
        self._finish(engines, END_TIMEOUT_S, "kill", "it failed")

    def _finish(self, engines: Iterable[int], timeout: float, method: str, *arguments: Any) -> None:
        hosts = [self.members[index].host for index in engines]
        for host in hosts:
            with suppress(Exception):  # one that is still being built would leave its files behind
                result(host.built, host.name, timeout)
        ending = [(host, host.call(method, *arguments)) for host in hosts]
        for host, answer in ending:
            try:
                result(answer, host.name, timeout)
            except Exception as error:  # it is being ended anyway
                log.debug("%s of %s: %s", method, host.name, error)
            host.kill()

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
        failed = self._tell(engines, "sleep")
        if failed:
            log.warning(
                "%s", "\n".join(f"engine {index} did not sleep: {why}" for index, why in failed.items())
            )
        self._end(failed)  # the sampler finds them dead, and has them replaced

    @property
    def _present(self) -> list[Member]:
        """Engines that can take requests, in order."""
        return [self.members[index] for index in sorted(self.members) if not self.members[index].absent]

    @property
    def _up(self) -> list[int]:
        """Engines that were started, whether they have joined or not."""
        members = self.members
        return [index for index in sorted(members) if not members[index].absent or members[index].joined]

    def _tell(self, engines: Iterable[int], method: str, *arguments: Any) -> Reasons:
        """Call a method of these engines, wait for all, and return the reasons of those that failed. An
        engine that dies during the call is noticed when it is next used."""
        asked = [(index, self.members[index].host) for index in engines]
        answers = [
            (index, host, host.call("call", method, *arguments, timeout=self.order.timeout))
            for index, host in asked
        ]
        failed: Reasons = {}
        for index, host, answer in answers:
            try:
                result(answer, host.name, self.order.timeout + SLACK_S)
            except (EngineError, ProcessDiedError) as error:
                failed[index] = str(error)
                log.debug("%s: %s", host.name, error)
        return failed
