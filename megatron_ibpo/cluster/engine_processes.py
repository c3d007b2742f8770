"""The processes of a run's engines: launched, built, asked and ended."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from megatron_ibpo.cluster.actor import Host, gather, in_bundle, result
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.cluster.engine_handles import END_TIMEOUT_S, SLACK_S, Member
from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.cluster.reservation import lost_nodes
from megatron_ibpo.cluster.trainers import START_TIMEOUT_S, Trainers
from megatron_ibpo.engines import EngineError, EngineLostError
from megatron_ibpo.engines.settings import EngineSettings

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

        Raises:
            ProcessDiedError: a process did not start.
        """
        with_trainers = {slot.node for slot in self.placement.trainers}
        slots = self.placement.engines
        engine_by_node = {
            slot.node: index for index, slot in enumerate(slots) if slot.node not in with_trainers
        }
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
        """Start building an engine in its process, without waiting.

        Args:
            hf_dir: its model; None: that of the run.
            is_restart: True in place of an engine that died.
        """
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
        path = self.logs / f"engine_{index}.log"
        self.members[index].host.build(FACTORY, environment, self.engine, settings, path, is_restart)

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

    def tell(self, engines: Iterable[int], method: str, timeout: float) -> Reasons:
        """Call a method of these engines, wait for all, and return the reasons of those that failed. An
        engine that dies during the call is noticed when it is next used."""
        hosts = [(index, self.members[index].host) for index in engines]
        calls = [(index, host, host.call("call", method, timeout=timeout)) for index, host in hosts]
        failed: Reasons = {}
        for index, host, ref in calls:
            try:
                result(ref, host.name, timeout + SLACK_S)
            except (EngineError, ProcessDiedError) as error:
                failed[index] = str(error)
                log.debug("%s: %s", host.name, error)
        return failed

    def start_fresh(self, index: int, hf_dir: Path) -> None:
        """End a living engine, and wait for a new one with this model in its place."""
        self.stop([index])
        self.members[index].replaced_by(self._host(index))
        self.build(index, hf_dir)
        self.wait([index])
