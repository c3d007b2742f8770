"""The processes of a run's engines: launched, built, asked, given weights and ended; and handles of an engine
for the driver, the sampler and the trainers."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.cluster.actor import Host, awaited, gather, in_bundle, result
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.cluster.reservation import lost_nodes
from megatron_ibpo.cluster.trainers import START_TIMEOUT_S, Trainers
from megatron_ibpo.engines import EngineDiedError, EngineError, EngineLostError
from megatron_ibpo.engines.protocol import EngineSettings
from megatron_ibpo.weights.transfer.link import UpdateOrder

CLOSE_TIMEOUT_S = 45.0
"""Seconds for an engine to stop in order: somewhat more than twice the time that it gives vLLM itself."""
FACTORY = "megatron_ibpo.engines.registry:start_engine"
CALLS_AT_ONCE = 8
"""Concurrent calls of an engine: one waits for samples while others submit, abort or kill."""
END_TIMEOUT_S = 2.0
"""Seconds for a dead engine to be removed in order, which takes some tens of milliseconds; after that its
process is ended by force. Its successor waits for it."""
SLACK_S = 2.0
"""Seconds for an answer to come back, beyond the time given to the engine itself."""
LOOK_EVERY_S = 0.1
"""Seconds between looks at engines that are starting."""
Reasons = dict[int, str]
"""Index of an engine → why it died."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One engine: its present process, and the record of earlier ones."""

    index: int
    host: Host
    connected: bool = False
    """True once the trainers have connected to this process for weight updates."""
    since: float | None = None
    """time.monotonic() when it began to work; None while it does not."""
    deaths: list[tuple[int, float]] = field(default_factory=list)
    """(version of the weights, seconds that the engine had worked) at each death."""
    absent: bool = False
    """True from its death until it has joined the others again."""
    join_future: Future[None] | None = None
    """Set while the restarted engine waits to join; completes when it has joined."""
    starting: bool = False
    """True while its new process is starting."""

    def replaced_by(self, host: Host) -> None:
        """Replace the process by another one, which the trainers have not connected to."""
        self.host, self.connected = host, False


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine as the sampler sees it (`engines.protocol.AsyncEngine`), whichever process it is now."""

    member: Member

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        await self._call("submit", list(requests), version)

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        return await self._call("take", timeout)

    async def abort(self, numbers: Collection[int]) -> None:
        await self._call("abort", list(numbers))

    async def kill(self, reason: str) -> None:
        """End it in order, or by force if its process does not answer."""
        host = self.member.host
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._call("kill", reason)
        except TimeoutError:
            host.kill()

    async def _call(self, method: str, *arguments: Any) -> Any:
        host = self.member.host
        try:
            return await awaited(host.call(method, *arguments), host.name)
        except ProcessDiedError as error:
            raise EngineDiedError(str(error)) from None


@dataclass(frozen=True, slots=True)
class IdleEngine:
    """An engine for the exclusive use of its holder."""

    host: Host

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """Return one sample for each request, in order."""
        answer = self.host.call("generate", list(requests), version=version, timeout=timeout)
        return result(answer, self.host.name, timeout + SLACK_S)

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Return the result of a control method of the engine's process."""
        answer = self.host.call("call", method, *arguments, timeout=timeout)
        return result(answer, self.host.name, timeout + SLACK_S)


@dataclass(slots=True)
class RemoteLink:
    """An engine as a weight update sees it (`weights.transfer.EngineLink`), from a trainer's process."""

    host: Host
    begin_ref: Any = None

    def begin(self, method: str, *arguments: Any) -> None:
        self.begin_ref = self.host.call("begin", method, *arguments)

    def result(self, timeout: float) -> Any:
        # the engine's calls run in threads: the second must not overtake the first
        result(self.begin_ref, self.host.name, timeout)
        return result(self.host.call("result", timeout), self.host.name, timeout + SLACK_S)


@dataclass
class EngineProcesses:
    """One process per engine, and those that have taken the place of dead ones."""

    trainers: Trainers
    placement: Placement
    group: PlacementGroup
    engine: str | None
    """Name or import path of the engine (--rollout-backend)."""
    settings: EngineSettings
    """Settings of each engine; its GPUs are filled in."""
    logs: Path
    start_timeout: float
    """Seconds that an engine may take to start."""
    members: dict[int, Member] = field(default_factory=dict)
    """The engines by index."""

    def launch(self) -> None:
        """Start the processes that will run the engines, without waiting."""
        for index in range(len(self.placement.engines)):
            self.members[index] = Member(index, self._host(index))

    def main_memory(self) -> dict[int, int]:
        """Return the bytes on each node that has engines and no trainers, by its index in the placement.
        Raises ProcessDiedError if a process did not start."""
        engine_by_node = {slot.node: index for index, slot in enumerate(self.placement.engines)}
        for slot in self.placement.trainers:
            engine_by_node.pop(slot.node, None)
        hosts = [self.members[index].host for index in engine_by_node.values()]
        places = gather([host.location() for host in hosts], [host.name for host in hosts], START_TIMEOUT_S)
        return {node: place.memory for node, place in zip(engine_by_node, places, strict=True)}

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

    def build(self, index: int, hf_dir: Path | None = None, *, is_restart: bool = False) -> None:
        """Start building an engine in its process, without waiting: with the run's model or that in `hf_dir`,
        and with `is_restart` in place of one that died."""
        placement = self.placement
        gpus = self.trainers.gpus(placement.partners[index]) if placement.colocated else ()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        count = len(gpus) or placement.engines[index].gpus
        settings = replace(
            self.settings,
            gpus=tuple(range(count)),
            spans_nodes=placement.spans_nodes(index),
            model=str(hf_dir or self.settings.model),
        )
        if settings.spans_nodes:  # never run so far: it needs nodes with GPUs
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        log_file = self.log_of(index)
        self.members[index].host.build(FACTORY, environment, self.engine, settings, log_file, is_restart)

    def log_of(self, index: int) -> Path:
        """Return the file that an engine logs to."""
        return self.logs / f"engine_{index}.log"

    def stop(self, engines: Iterable[int]) -> None:
        """End these engines' processes, whatever state they are in."""
        self._finish(engines, CLOSE_TIMEOUT_S, "close")

    def wait(self, engines: Iterable[int]) -> None:
        """Wait until these engines can take requests. Raises EngineStartError with the end of a log."""
        hosts = [self.members[index].host for index in engines]
        names = [host.name for host in hosts]
        gather([host.built for host in hosts], names)  # calls run in threads, and none may overtake this one
        gather([host.call("wait_ready", self.start_timeout) for host in hosts], names)

    def start_again(self, member: Member) -> None:
        """Start a new process for a dead engine and wait until it can take requests."""
        index = member.index
        log.warning("engine %d: starting it again", index)
        self.end([index])
        slot = self.placement.engines[index]
        if lost := lost_nodes(self.placement, [slot.node]):
            raise EngineLostError(f"engine {index} was lost with {lost[0]}")
        member.replaced_by(self._host(index))
        self.build(index, is_restart=True)
        self.wait([index])

    def end(self, engines: Iterable[int]) -> None:
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

    def call_each(
        self, engines: Iterable[int], method: str, timeout: float
    ) -> tuple[dict[int, Any], Reasons]:
        """Call a method of these engines, and wait for all. Return the answers, and the reasons of engines
        that failed. One that dies during the call is noticed when it is next used."""
        hosts = [(index, self.members[index].host) for index in engines]
        calls = [(index, host, host.call("call", method, timeout=timeout)) for index, host in hosts]
        results: dict[int, Any] = {}
        failed: Reasons = {}
        for index, host, ref in calls:
            try:
                results[index] = result(ref, host.name, timeout + SLACK_S)
            except (EngineError, ProcessDiedError) as error:
                failed[index] = str(error)
                log.debug("%s: %s", host.name, error)
        return results, failed

    def start_fresh(self, index: int, hf_dir: Path) -> None:
        """End a living engine, and wait for a new one with this model in its place."""
        self.stop([index])
        self.members[index].replaced_by(self._host(index))
        self.build(index, hf_dir)
        self.wait([index])

    def send_weights(self, engines: Iterable[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Give `engines` the trainers' weights according to `order`, in a second pass to those that fail in
        the first: a living engine can take part again, and a dead one fails again at once. One whose process
        the sampler replaces meanwhile takes part no more, since its successor is still being built. Return
        (bytes sent, bytes of their shards, engines that failed twice or were replaced)."""
        hosts = {index: self.members[index].host for index in engines}
        sent, needed, failed = self._pass(hosts, order)
        if failed:
            log.warning(
                "\n".join(f"engine {index} has no weights yet: {reason}" for index, reason in failed.items())
            )
        retried = {
            index: hosts[index] for index in sorted(failed) if self.members[index].host is hosts[index]
        }
        if not retried:
            return sent, needed, failed
        sent_again, needed_again, failed_again = self._pass(retried, order)
        replaced = {index: reason for index, reason in failed.items() if index not in retried}
        return sent + sent_again, needed + needed_again, replaced | failed_again

    def _pass(self, hosts: Mapping[int, Host], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Connect the trainers to those of `hosts` that are new to them, and send the weights to all. Return
        as `send_weights`."""
        strangers = [index for index in hosts if not self.members[index].connected]
        dead: Reasons = {}
        if strangers:
            arguments = [(links, strangers) for links in self._links(hosts, strangers)]
            dead = self._reasons(self.trainers.call_each("connect", arguments))
            self._note_connected(hosts, {index: index not in dead for index in strangers})
        present = [index for index in hosts if index not in dead]
        if not present:
            return 0, 0, dead
        orders = [(links, present, order) for links in self._links(hosts, present)]
        passes = self.trainers.call_each("send", orders)
        dead |= self._reasons([done.failures for done in passes])
        self._note_connected(hosts, dict.fromkeys(dead, False))
        return sum(done.num_bytes for done in passes), passes[0].needed_bytes, dead

    def _note_connected(self, hosts: Mapping[int, Host], connected: Mapping[int, bool]) -> None:
        """Note to which engines the trainers are connected, except for those that were replaced meanwhile."""
        for index, value in connected.items():
            if self.members[index].host is hosts[index]:
                self.members[index].connected = value

    def _links(self, hosts: Mapping[int, Host], engines: Sequence[int]) -> list[dict[int, RemoteLink]]:
        """Return, for each trainer rank, those of `engines` that it owns."""
        owners = self.placement.owners
        return [
            {index: RemoteLink(hosts[index]) for index in engines if owners[index] == rank}
            for rank in range(len(self.placement.trainers))
        ]

    def _reasons(self, parts: Sequence[Mapping[int, str]]) -> Reasons:
        """Return every engine that a rank found dead; its owner knows the reason best."""
        owners, reasons = self.placement.owners, Reasons()
        for rank, part in enumerate(parts):
            for index, reason in part.items():
                if index not in reasons or owners[index] == rank:
                    reasons[index] = reason
        return reasons
