"""One engine of a run, and its handles for the driver, the sampler and the trainers."""

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.cluster.actor import Host, awaited, result
from megatron_ibpo.cluster.deaths import ProcessDiedError
from megatron_ibpo.engines import EngineDiedError

END_TIMEOUT_S = 2.0
"""Seconds for a dead engine to be removed in order, which takes some tens of milliseconds; after that its
process is ended by force. Its successor waits for it."""
SLACK_S = 2.0
"""Seconds for an answer to come back, beyond the time given to the engine itself."""


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
