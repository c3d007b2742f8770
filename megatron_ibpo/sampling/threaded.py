"""An engine of this process, for use from an event loop."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.engines import Engine


@dataclass(frozen=True, slots=True)
class ThreadedEngine:
    """A `engines.AsyncEngine` whose blocking calls wait in threads."""

    engine: Engine

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        await asyncio.to_thread(self.engine.submit, requests, version)

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        return await asyncio.to_thread(self.engine.take, timeout)

    async def abort(self, numbers: Collection[int]) -> None:
        await asyncio.to_thread(self.engine.abort, numbers)

    async def kill(self, why: str) -> None:
        await asyncio.to_thread(self.engine.kill, why)
