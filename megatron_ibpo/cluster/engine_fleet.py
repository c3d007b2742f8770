"""The engine processes of a run: which of them can work, and how they share GPUs with the trainers."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ibpo.cluster.engine_handles import Member
from megatron_ibpo.cluster.engine_processes import LOOK_EVERY_S, EngineProcesses, Reasons
from megatron_ibpo.cluster.engine_updates import catch_up
from megatron_ibpo.weights.transfer.update_order import UpdateOrder

log = logging.getLogger(__name__)


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

    def sleep_all(self) -> None:
        """Let all engines that were started sleep."""
        self._wait_for_starts()
        self.sleep_or_end(self.up)

    def sleep_or_end(self, engines: Iterable[int]) -> None:
        """Let engines sleep; end those that do not, since their memory is needed."""
        failed = self.processes.tell(engines, "sleep", self.order.timeout)
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
