"""The engine processes of a run: which of them can work, how they share GPUs with the trainers, and their
updates with the trainers' weights."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ibpo.cluster.actor import Host
from megatron_ibpo.cluster.engine_processes import (
    LOOK_EVERY_S,
    EngineProcesses,
    Member,
    Reasons,
    RemoteLink,
)
from megatron_ibpo.weights.transfer.link import UpdateOrder

log = logging.getLogger(__name__)


def catch_up(
    processes: EngineProcesses, engines: Sequence[int], order: UpdateOrder
) -> tuple[int, int, Reasons]:
    """Give `engines` the current weights according to `order`, in a second pass to those that fail in the
    first: a living engine can take part again, and a dead one fails again at once. One whose process the
    sampler replaces meanwhile takes part no more, since its successor is still being built. Return (bytes
    sent, bytes of their shards, engines that failed twice or were replaced)."""
    hosts = {index: processes.members[index].host for index in engines}
    sent, needed, failed = _pass(processes, hosts, order)
    retried = {
        index: hosts[index] for index in sorted(failed) if processes.members[index].host is hosts[index]
    }
    if failed:
        log.warning(
            "\n".join(f"engine {index} has no weights yet: {reason}" for index, reason in failed.items())
        )
    if not retried:
        return sent, needed, failed
    sent_again, needed_again, failed_again = _pass(processes, retried, order)
    replaced = {index: reason for index, reason in failed.items() if index not in retried}
    return sent + sent_again, needed + needed_again, replaced | failed_again


def _pass(
    processes: EngineProcesses, hosts: Mapping[int, Host], order: UpdateOrder
) -> tuple[int, int, Reasons]:
    """Connect the trainers to those of `hosts` that are new to them, and send the weights to all. Return as
    `catch_up`."""
    ranks = range(len(processes.placement.trainers))
    strangers = [index for index in hosts if not processes.members[index].connected]
    dead: Reasons = {}
    if strangers:
        arguments = [(_links(processes, rank, hosts, strangers), strangers) for rank in ranks]
        dead = _reasons(processes, processes.trainers.call_each("connect", arguments))
        _set_connected(processes, hosts, {index: index not in dead for index in strangers})
    present = [index for index in hosts if index not in dead]
    if not present:
        return 0, 0, dead
    orders = [(_links(processes, rank, hosts, present), present, order) for rank in ranks]
    passes = processes.trainers.call_each("send", orders)
    dead |= _reasons(processes, [done.failures for done in passes])
    _set_connected(processes, hosts, dict.fromkeys(dead, False))
    return sum(done.num_bytes for done in passes), passes[0].needed_bytes, dead


def _set_connected(
    processes: EngineProcesses, hosts: Mapping[int, Host], connected: Mapping[int, bool]
) -> None:
    """Note to which engines the trainers are connected, except for those that were replaced meanwhile."""
    for index, value in connected.items():
        member = processes.members[index]
        if member.host is hosts[index]:
            member.connected = value


def _links(
    processes: EngineProcesses, rank: int, hosts: Mapping[int, Host], engines: Sequence[int]
) -> dict[int, RemoteLink]:
    """Return those of `engines` that this rank is connected to."""
    owners = processes.placement.owners
    return {index: RemoteLink(hosts[index]) for index in engines if owners[index] == rank}


def _reasons(processes: EngineProcesses, parts: Sequence[Mapping[int, str]]) -> Reasons:
    """Return every engine that a rank found dead; its owner knows the reason best."""
    owners = processes.placement.owners
    reasons: Reasons = {}
    for rank, part in enumerate(parts):
        for index, reason in part.items():
            if index not in reasons or owners[index] == rank:
                reasons[index] = reason
    return reasons


@dataclass
class EngineFleet:
    """The engines of a run in their present state: what updates and restarts both work on."""

    processes: EngineProcesses
    order: UpdateOrder
    """Settings of the next update."""
    sending: bool = False
    """True while trainers hold their weights on GPUs that they share with engines, to send them."""

    @property
    def members(self) -> dict[int, Member]:
        """The engines by index."""
        return self.processes.members

    @property
    def sleeps(self) -> bool:
        """True if engines sleep while trainers use their GPUs."""
        return self.processes.settings.sleep_mode

    @property
    def alive(self) -> int:
        """Number of engines that can take requests, without those being restarted or given up."""
        return sum(not member.absent for member in self.members.values())

    @property
    def present(self) -> list[Member]:
        """Engines that can take requests, in order."""
        return [self.members[index] for index in sorted(self.members) if not self.members[index].absent]

    @property
    def up(self) -> list[int]:
        """Engines that were started, whether they have joined or not."""
        members = self.members
        return [index for index in sorted(members) if not members[index].absent or members[index].join_future]

    def send_weights(self, engines: list[int], order: UpdateOrder) -> tuple[int, int, Reasons]:
        """Give `engines` the trainers' weights, as `catch_up` does, while no engine on their GPUs starts."""
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

    def draft_acceptance(self) -> dict[str, float]:
        """Return the share of drafted tokens that engines accepted since the last call; empty if they draft
        none."""
        if not self.processes.settings.drafts:
            return {}
        present = [member.index for member in self.present]
        counts, _ = self.processes.call_each(present, "drafts", self.order.timeout)
        drafted = sum(number for number, _ in counts.values())
        accepted = sum(number for _, number in counts.values())
        return {"draft_acceptance": accepted / drafted} if drafted else {}

    def sleep_all(self) -> None:
        """Let all engines that were started sleep."""
        self._wait_for_starts()
        self.sleep_or_end(self.up)

    def sleep_or_end(self, engines: Iterable[int]) -> None:
        """Let engines sleep; end those that do not, since their memory is needed."""
        _, failed = self.processes.call_each(engines, "sleep", self.order.timeout)
        if failed:
            log.warning(
                "%s", "\n".join(f"engine {index} did not sleep: {reason}" for index, reason in failed.items())
            )
        self.processes.end(failed)  # the sampler finds them dead, and has them replaced

    @property
    def any_starts(self) -> bool:
        """True while an engine is starting."""
        return any(member.starting for member in self.members.values())

    def _wait_for_starts(self) -> None:
        """Wait until no engine is starting, since trainers need the memory. Each start has a time-out."""
        while self.any_starts:
            time.sleep(LOOK_EVERY_S)
