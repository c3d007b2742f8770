"""The engines of a run: started, fed through the Sampler, given new weights, replaced when they die."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from megatron_ibpo.cluster.host import Host, ProcessDiedError, awaited, gather, in_bundle, result
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.cluster.trainers import Trainers
from megatron_ibpo.records import Sample, SampleRequest
from megatron_ibpo.rollout.engine import EngineDiedError, EngineError
from megatron_ibpo.rollout.settings import EngineSettings
from megatron_ibpo.weights.transfer.order import Order

ALLOWED_RESTARTS = 3
"""In a run. An engine that dies again and again has a cause that starting it does not mend."""
FACTORY = "megatron_ibpo.rollout.engine:Engine"
CALLS_AT_ONCE = 8
"""Of an engine: one waits for samples while others submit, abort or kill."""
SLACK_S = 10.0
"""For an answer to come back, beyond the time that the engine itself was given."""

Reasons = dict[int, str]
"""By engine: how it died."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine as the Sampler asks it (`rollout.protocol.AsyncEngine`), whichever process it is now."""

    hosts: Mapping[int, Host]
    index: int

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        await self._call("submit", list(requests), version)

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        return await self._call("take", timeout)

    async def abort(self, numbers: Collection[int]) -> None:
        await self._call("abort", list(numbers))

    async def kill(self, why: str) -> None:
        await self._call("kill", why)

    async def _call(self, method: str, *arguments: Any) -> Any:
        host = self.hosts[self.index]
        try:
            return await awaited(host.call(method, *arguments), host.name)
        except ProcessDiedError as error:
            raise EngineDiedError(str(error)) from None


@dataclass(frozen=True, slots=True)
class IdleEngine:
    """An engine that nobody else asks meanwhile."""

    host: Host

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """One sample for each request, in order."""
        answer = self.host.call("generate", list(requests), version=version, timeout=timeout)
        return result(answer, self.host.name, timeout + SLACK_S)

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """What a control method of vLLM's process gives."""
        answer = self.host.call("call", method, *arguments, timeout=timeout)
        return result(answer, self.host.name, timeout + SLACK_S)


@dataclass(slots=True)
class RemoteLink:
    """An engine as a weight update asks it (`weights.transfer.EngineLink`), from a trainer's process."""

    host: Host
    begun: Any = None

    def begin(self, method: str, *arguments: Any) -> None:
        self.begun = self.host.call("begin", method, *arguments)

    def result(self, timeout: float) -> Any:
        # the engine's calls run in threads: the second must not overtake the first
        result(self.begun, self.host.name, timeout)
        return result(self.host.call("result", timeout), self.host.name, timeout + SLACK_S)


@dataclass
class Engines:
    """All engines of a run, as the driver holds them."""

    trainers: Trainers
    placement: Placement
    group: PlacementGroup
    settings: EngineSettings
    """Of each of them; which GPUs it has is filled in."""
    logs: Path
    order: Order
    """How the next update is done."""
    start_timeout: float
    """Seconds that an engine may take to start."""
    restarts: int = 0
    """Engines started again in this run because they died."""
    hosts: dict[int, Host] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    """Engines that the trainers have met for weight updates."""

    def launch(self) -> None:
        """Start the processes that will hold the engines, without waiting."""
        for index in range(len(self.placement.engines)):
            self.hosts[index] = self._host(index)

    def start(self) -> None:
        """Start the engines in them, once the trainers' places are known, and return at once."""
        for index in self.hosts:
            self._build(index)

    def wait_ready(self) -> None:
        """Wait until every engine can be asked.

        Raises:
            EngineStartError: one did not start; with the end of its log.
        """
        self._wait(self.hosts)

    def clients(self) -> list[RemoteEngine]:
        """What the Sampler asks, by engine."""
        return [RemoteEngine(self.hosts, index) for index in sorted(self.hosts)]

    @property
    def version(self) -> int:
        """Of the weights that the engines sample with."""
        return self.order.version

    def sleep(self) -> None:
        """Let engines on the trainers' GPUs give back their memory; `wake` or an update wakes them.

        Does nothing elsewhere: an idle engine uses no processor.
        """
        if not self.order.sleeping and self.settings.sleep_mode:
            self._tell("sleep")
            self.order = replace(self.order, sleeping=True)

    def wake(self) -> None:
        """Let sleeping engines sample again, with the weights that they had."""
        if self.order.sleeping:
            self._tell("wake", "weights")
            self._tell("wake", "kv_cache")
            self.order = replace(self.order, sleeping=False)

    def update_weights(self, version: int) -> dict[str, float]:
        """Give all engines the trainers' weights as policy `version`, wake them, clear their caches.

        Returns:
            weight_update_seconds, weight_update_bytes (to all workers of all engines), and
            weight_update_bytes_ratio (those, over what the workers' shards take).

        Raises:
            WeightPlanError: the trainers' tensors are not those that the engines load.
            WeightMismatchError: with --check-weight-update-equal, other bytes arrived than were sent.
            EngineError: an engine died and the run's restarts are used up.
        """
        began = time.monotonic()
        self.order = replace(self.order, version=version)
        sent, needed, dead = self._catch_up(sorted(self.hosts))
        self.order = replace(self.order, sleeping=False)
        if dead:
            self._restart(dead)
        return {
            "weight_update_seconds": time.monotonic() - began,
            "weight_update_bytes": float(sent),
            "weight_update_bytes_ratio": sent / needed if needed else 1.0,
        }

    async def revive(self, index: int) -> RemoteEngine:
        """Another engine in the place of one that died, with the current weights.

        Raises:
            EngineError: the run's restarts are used up.
        """
        await asyncio.to_thread(self._restart, {index: "while it sampled"})
        return RemoteEngine(self.hosts, index)

    @contextmanager
    def fresh(self, index: int, hf_dir: Path) -> Iterator[IdleEngine]:
        """A fresh engine with the weights of `hf_dir` as version 0, in the place of one that lives; it stays,
        and gets the current weights in the end."""
        self._replace([index], hf_dir)
        yield self.idle(index)
        _, _, dead = self._catch_up([index])
        if dead:
            raise _give_up(dead)

    def idle(self, index: int) -> IdleEngine:
        """One engine, to be asked by itself."""
        return IdleEngine(self.hosts[index])

    def close(self) -> None:
        """Stop all engines; nothing of them remains, whatever state they are in."""
        self._stop(self.hosts)
        self.hosts.clear()

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

    def _build(self, index: int, hf_dir: Path | None = None) -> None:
        placement = self.placement
        gpus = self.trainers.gpus(placement.partners[index]) if placement.colocated else ()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        count = len(gpus) or placement.engines[index].gpus
        settings = replace(self.settings, gpus=tuple(range(count)), model=str(hf_dir or self.settings.model))
        if placement.spans_nodes(index):  # not run: it takes nodes with GPUs
            extra = {**settings.extra_arguments, "distributed_executor_backend": "ray"}
            settings = replace(settings, extra_arguments=extra)
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self.hosts[index].build(FACTORY, environment, settings, self.logs / f"engine_{index}.log")

    def _stop(self, engines: Iterable[int]) -> None:
        """End these engines' processes, whatever state they are in."""
        closing = [(self.hosts[index], self.hosts[index].call("close")) for index in engines]
        for host, answer in closing:
            try:
                result(answer, host.name, self.start_timeout)
            except Exception as error:  # it is to go anyway
                log.debug("closing %s: %s", host.name, error)
            host.kill()

    def _wait(self, engines: Iterable[int]) -> None:
        hosts = [self.hosts[index] for index in engines]
        names = [host.name for host in hosts]
        gather([host.built for host in hosts], names)  # calls run in threads: none may overtake this one
        gather([host.call("wait_ready", self.start_timeout) for host in hosts], names)

    def _catch_up(self, engines: Sequence[int]) -> tuple[int, int, Reasons]:
        """Give `engines` the current weights; (bytes sent, bytes that their shards take, those that died)."""
        ranks = range(len(self.placement.trainers))
        strangers = [index for index in engines if index not in self.connected]
        dead: Reasons = {}
        if strangers:
            asked = [(self._links(rank, strangers), strangers) for rank in ranks]
            dead = self._reasons(self.trainers.each("connect", asked))
            self.connected |= set(strangers) - set(dead)
        present = [index for index in engines if index not in dead]
        if not present:
            return 0, 0, dead
        orders = [(self._links(rank, present), present, self.order) for rank in ranks]
        passes = self.trainers.each("send", orders)
        dead |= self._reasons([done.failures for done in passes])
        self.connected -= set(dead)
        return sum(done.num_bytes for done in passes), passes[0].needed_bytes, dead

    def _links(self, rank: int, engines: Sequence[int]) -> dict[int, RemoteLink]:
        """The engines that this rank speaks with."""
        owners = self.placement.owners
        return {index: RemoteLink(self.hosts[index]) for index in engines if owners[index] == rank}

    def _reasons(self, parts: Sequence[Mapping[int, str]]) -> Reasons:
        """Every engine that some rank found dead; its owner knows most of why."""
        owners = self.placement.owners
        reasons: Reasons = {}
        for rank, part in enumerate(parts):
            for index, reason in part.items():
                if index not in reasons or owners[index] == rank:
                    reasons[index] = reason
        return reasons

    def _restart(self, dead: Reasons) -> None:
        """Start dead engines again, with the current weights.

        Raises:
            EngineError: the run has used up its restarts, or one died again over it.
        """
        if self.restarts + len(dead) > ALLOWED_RESTARTS:
            raise _give_up(dead)
        self.restarts += len(dead)
        log.warning("%s\nstarting it again with the current weights", _describe(dead))
        self._replace(sorted(dead))
        if self.version == 0:
            return  # it has loaded them
        # where engines share a group, one that died has broken it for all
        shared = self.settings.transport == "nccl"
        everyone = sorted(self.hosts) if shared else sorted(dead)
        self.connected -= set(everyone)
        _, _, dead_again = self._catch_up(everyone)
        if dead_again:
            raise _give_up(dead_again)

    def _replace(self, engines: Sequence[int], hf_dir: Path | None = None) -> None:
        self._stop(engines)
        self.connected -= set(engines)
        for index in engines:
            self.hosts[index] = self._host(index)
            self._build(index, hf_dir)
        self._wait(engines)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Ask every engine; one that died over it is noticed when it is used next."""
        answers = [
            (host, host.call("call", method, *arguments, timeout=self.order.timeout))
            for host in self.hosts.values()
        ]
        for host, answer in answers:
            try:
                result(answer, host.name, self.order.timeout + SLACK_S)
            except (EngineError, ProcessDiedError) as error:
                log.debug("%s: %s", host.name, error)


def _give_up(dead: Reasons) -> EngineError:
    return EngineError(f"{_describe(dead)}\nengines are started again {ALLOWED_RESTARTS} times in a run")


def _describe(dead: Reasons) -> str:
    return "\n".join(f"engine {index} died: {reason}" for index, reason in dead.items())
