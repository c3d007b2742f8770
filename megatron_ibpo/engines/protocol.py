"""The protocol of engines: a stream of requests in, a stream of finished samples out."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ibpo.basics.records import Sample, SampleRequest


class EngineError(RuntimeError):
    """An engine cannot do what was requested."""


class EngineStartError(EngineError):
    """The engine did not start; the message ends with the last lines of vLLM's own log."""


class EngineDiedError(EngineError):
    """The engine ended or stopped answering; the message ends with the last lines of its log."""


class EngineLostError(EngineError):
    """The engine ended and cannot be replaced for now; the others can go on."""


def too_old(present: object, version: int) -> str:
    """Return why an engine with the weights of policy `present` refuses requests for those of `version`."""
    return f"asked to sample with policy version {version}, the engine has {present}"


class AsyncEngine(Protocol):
    """One engine, wherever it runs. The caller numbers its requests; samples come back under these numbers in
    any order."""

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add requests to the running ones, to be sampled with the weights of policy `version` or later.
        Raises EngineDiedError if the engine is gone."""

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return what has finished since the last call. Wait at most `timeout` seconds for the first sample;
        return an empty list if none came.

        Raises:
            EngineDiedError: the engine is gone, and all that it had finished has been taken; or it had
                requests and wrote nothing for too long.
            EngineError: it refuses the requests: its weights are older.
        """

    async def abort(self, numbers: Collection[int]) -> None:
        """Drop these requests: they take no more computation and their samples never come."""

    async def kill(self, reason: str) -> None:
        """End an engine that has stopped working, by force if it does not answer; `take` then raises
        EngineDiedError with the reason."""


class Engine(Protocol):
    """One engine in the process that owns it. A run's processes build it as `Class(settings, log,
    is_restart)`: its `EngineSettings`, the path of its log, and whether it replaces one that died.
    `parameters`, a dataclass of its flags, and its static methods `make_settings`, `start_timeout`, `needs`
    and `precision` take the place of vLLM's, and `model_problems` says why it cannot
    compute a model (`engines.registry`).

    A sample's log-probs are those of the distribution that was sampled from. A class that fills in
    `Sample.sampling_mask` where top-k or top-p cut it (`SampleRequest.is_cut`) has a static method
    `sampling_mask_obstacle(config, on_gpu)`, which returns None, or why it does not for these settings;
    without it a run whose loss reads the log-probs of such samples is refused.

    Any thread may call any method. An engine in a training run also answers the calls of a weight update
    (`weights.transfer.link.WeightReceiver`), and `sleep` and `wake` if it shares the trainers' GPUs.
    """

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine can take requests. Raises EngineStartError if it does not start within
        `timeout` seconds."""

    def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add numbered requests, as `AsyncEngine.submit`."""

    def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return what has finished since the last call, as `AsyncEngine.take`."""

    def abort(self, numbers: Collection[int]) -> None:
        """Drop these requests."""

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """Return one sample for each request, in order; call it only while no other request runs."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Start a control call without waiting for its answer."""

    def result(self, timeout: float) -> Any:
        """Return the answer to the call that `begin` started."""

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call `begin`, then `result`."""

    def kill(self, reason: str | None = None) -> None:
        """End the engine at once, with everything it started."""

    def close(self) -> None:
        """Stop the engine in order. No process of it remains."""


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

    async def kill(self, reason: str) -> None:
        await asyncio.to_thread(self.engine.kill, reason)
