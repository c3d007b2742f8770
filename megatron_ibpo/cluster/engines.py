"""The engines of a run: fed by the Sampler, updated with new weights, replaced when they die."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.cluster.engine_fleet import EngineFleet
from megatron_ibpo.cluster.engine_handles import IdleEngine, RemoteEngine
from megatron_ibpo.cluster.engine_processes import EngineProcesses
from megatron_ibpo.cluster.engine_restarts import EngineRestarts
from megatron_ibpo.cluster.engine_updates import draft_acceptance
from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.transfer.update_order import UpdateOrder

log = logging.getLogger(__name__)


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
        """Wait until every engine can take requests.

        Raises:
            EngineStartError: one did not start; with the end of its log.
        """
        self.fleet.processes.wait(self.fleet.members)
        now = time.monotonic()
        for member in self.fleet.members.values():
            member.since = now

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
        } | draft_acceptance(fleet.processes, fleet.present, fleet.order.timeout)

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
