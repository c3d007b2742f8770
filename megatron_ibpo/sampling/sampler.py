"""The one way of asking engines and verifiers: requests go out as a stream, scored samples come back."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from megatron_ibpo.records import Prompt, Sample, SampleRequest
from megatron_ibpo.rollout import AsyncEngine, EngineDiedError, EngineError
from megatron_ibpo.sampling.meter import Meter
from megatron_ibpo.sampling.scoring import Score
from megatron_ibpo.sampling.tasks import together

TAKE_S = 1.0
"""Seconds that one look at an engine may take; between looks the Sampler sees whether it still works."""

Revive = Callable[[int], Awaitable[AsyncEngine]]
"""A new engine in the place of the one with this index, which has died; EngineError where there is none."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has no sample yet."""

    request: SampleRequest
    sample: asyncio.Future[Sample]


@dataclass(slots=True, eq=False)
class _Lane:
    """One engine and what it owes."""

    index: int
    engine: AsyncEngine
    state: Literal["alive", "mending", "gone"] = "alive"
    open: dict[int, _Open] = field(default_factory=dict)
    """Every request that it has or is about to get, by number."""
    unsent: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Requests that nobody waits for any more."""
    load: int = 0
    """Tokens that its requests may still take, at most."""
    sending: asyncio.Task[None] | None = None
    collecting: asyncio.Task[None] | None = None

    def close(self, number: int) -> _Open | None:
        """The request, which its engine no longer owes; None where it did not."""
        opened = self.open.pop(number, None)
        if opened is not None:
            self.load -= opened.request.max_tokens
        return opened

    def clear(self) -> list[_Open]:
        """All that the engine owes, which it no longer does."""
        opened = list(self.open.values())
        self.open, self.unsent, self.dropped, self.load = {}, [], [], 0
        return opened


class Sampler:
    """Asks engines for samples and verifiers for rewards, for training, evaluation, studies and the audit.

    Samples of one prompt go to one engine, where they share the prompt's cache; prompts are spread by load.
    What an engine leaves unfinished when it dies is asked again elsewhere, or of its successor. Every request
    has its own seed, so that it does not matter who answers, nor when.

    An engine that finishes none of its requests for `stall_timeout` seconds is ended, as one that died.
    """

    def __init__(
        self,
        engines: Sequence[AsyncEngine],
        score: Score,
        *,
        stall_timeout: float,
        max_context: int | None = None,
        revive: Revive | None = None,
    ) -> None:
        """
        Args:
            stall_timeout: --rollout-timeout.
            max_context: tokens that prompt and response may have together.
            revive: replaces an engine that died; without it, or when it raises, sampling ends with the error.
        """
        self.version = 0
        """Of the policy whose weights the engines must have. Whoever changes those says so here."""
        self._lanes = [_Lane(index, engine) for index, engine in enumerate(engines)]
        self._score = score
        self._stall_timeout = stall_timeout
        self._max_context = max_context
        self._revive = revive
        self._numbers = itertools.count()
        self._homeless: list[_Open] = []
        """Requests that wait until an engine lives again."""
        self._meter = Meter(len(engines))
        self._runner: asyncio.Runner | None = None

    # ------------------------------------------------------------------------------------ for the askers

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, which asks this Sampler, from a plain program: in an event loop of its own."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(self._finished(work))

    def close(self) -> None:
        """End the event loop; what is still asked for is given up."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_metrics(self) -> dict[str, float]:
        """What sampling took since the last call (`Meter`)."""
        return self._meter.take()

    async def answers(self, asked: Sequence[tuple[Prompt, SampleRequest]]) -> list[Sample]:
        """A scored sample for every request, in order. The requests of a prompt stay together."""
        by_prompt: dict[Prompt, list[int]] = {}
        for position, (prompt, _) in enumerate(asked):
            by_prompt.setdefault(prompt, []).append(position)
        answered = await together(
            self.answer(prompt, [asked[position][1] for position in positions])
            for prompt, positions in by_prompt.items()
        )
        samples: dict[int, Sample] = {}
        for positions, own in zip(by_prompt.values(), answered, strict=True):
            samples.update(zip(positions, own, strict=True))
        return [samples[position] for position in range(len(asked))]

    async def answer(
        self, prompt: Prompt, requests: Sequence[SampleRequest], near: int | None = None
    ) -> list[Sample]:
        """A sample for every request, in order, each scored as soon as it is there.

        Args:
            near: the engine that holds what these requests begin with (`place`).

        Raises:
            ValueError: a prompt is empty or leaves no room for a response.
            EngineError: an engine refused, or died and cannot be replaced.
        """
        for request in requests:
            _check_prompt(request, self._max_context)
        engine = self.place(requests, near)
        samples = [self._ask(request, engine) for request in requests]
        return await together(self._scored(prompt, sample) for sample in samples)

    def place(self, requests: Sequence[SampleRequest], near: int | None = None) -> int:
        """The engine that has the least to do; `near` as long as that saves less than these requests take."""
        lanes = [lane for lane in self._lanes if lane.state == "alive"] or self._lanes
        least = min(lanes, key=lambda lane: lane.load)
        if near is not None and self._lanes[near] in lanes:
            ahead = self._lanes[near].load - least.load
            if ahead <= sum(request.max_tokens for request in requests):
                return near
        return least.index

    async def _scored(self, prompt: Prompt, awaited: asyncio.Future[Sample]) -> Sample:
        sample = await awaited
        await self._score(prompt, sample)
        return sample

    async def _finished(self, work: Coroutine[Any, Any, T]) -> T:
        """The work, and then everything settled, so that nothing is left half done while the loop rests."""
        try:
            return await work
        finally:
            await self.settle()

    async def settle(self) -> None:
        """Wait until no engine owes anything or is being replaced."""
        while tasks := [
            task
            for lane in self._lanes
            for task in (lane.sending, lane.collecting)
            if task is not None and not task.done()
        ]:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------------------- requests and engines

    def _ask(self, request: SampleRequest, engine: int) -> asyncio.Future[Sample]:
        """The sample, when it comes. Cancelled, it takes its request back."""
        opened = _Open(request, asyncio.get_running_loop().create_future())
        self._assign(opened, self._lanes[engine])
        return opened.sample

    def _assign(self, opened: _Open, lane: _Lane) -> None:
        if lane.state != "alive":
            self._homeless.append(opened)
            if all(lane.state == "gone" for lane in self._lanes):
                self._fail(EngineError("no engine is left"))
            return
        number = next(self._numbers)
        lane.open[number] = opened
        lane.unsent.append(number)
        lane.load += opened.request.max_tokens
        opened.sample.add_done_callback(partial(self._take_back, lane, number))
        self._meter.asked(lane.index)
        self._start_sending(lane)
        if lane.collecting is None or lane.collecting.done():
            lane.collecting = asyncio.create_task(self._collect(lane))

    def _take_back(self, lane: _Lane, number: int, sample: asyncio.Future[Sample]) -> None:
        """Where nobody waits for a sample any more, its engine need not go on with it."""
        if sample.cancelled() and number in lane.open:
            lane.close(number)
            lane.dropped.append(number)
            self._start_sending(lane)

    def _start_sending(self, lane: _Lane) -> None:
        # What is asked before the loop turns goes out together: this task runs after those that ask now.
        if lane.sending is None or lane.sending.done():
            lane.sending = asyncio.create_task(self._send(lane))

    async def _send(self, lane: _Lane) -> None:
        """Hand over what is to be sent to this engine."""
        try:
            while lane.unsent or lane.dropped:
                numbers, lane.unsent = lane.unsent, []
                dropped, lane.dropped = lane.dropped, []
                requests = [(n, lane.open[n].request) for n in numbers if n in lane.open]
                if requests:
                    await lane.engine.submit(requests, self.version)
                if sent := set(dropped) - set(numbers):
                    await lane.engine.abort(sent)
        except EngineDiedError:
            return  # who collects from it is told as well
        except Exception as error:
            self._fail(error)

    async def _collect(self, lane: _Lane) -> None:
        """Take what this engine finishes as long as it owes anything."""
        clock = asyncio.get_running_loop().time
        heard = clock()
        while lane.open:
            try:
                finished = await lane.engine.take(TAKE_S)
                if finished:
                    heard = clock()
                    self._meter.finished(heard)
                elif clock() - heard >= self._stall_timeout:
                    heard = clock()
                    await lane.engine.kill(
                        f"no sample finished within {self._stall_timeout:g} seconds (--rollout-timeout)"
                    )
            except EngineDiedError as error:
                await self._mend(lane, error)
                heard = clock()
                continue
            except Exception as error:
                self._fail(error)
                return
            for number, sample in finished:
                opened = lane.close(number)
                if opened is not None and not opened.sample.done():
                    opened.sample.set_result(sample)

    async def _mend(self, lane: _Lane, error: EngineDiedError) -> None:
        """Ask again what a dead engine owes, at once where another lives, and have it replaced."""
        log.warning("engine %d died: %s", lane.index, error)
        lane.state = "mending"
        orphans = [opened for opened in lane.clear() if not opened.sample.done()]
        self._meter.died(len(orphans))
        self._homeless += orphans
        self._house()
        if lane.sending is not None:
            await asyncio.wait([lane.sending])  # it must not meet the successor
        try:
            if self._revive is None:
                raise EngineError(f"engine {lane.index} died: {error}")
            lane.engine = await self._revive(lane.index)
        except Exception as failure:
            lane.state = "gone"
            self._fail(failure)
            return
        lane.state = "alive"
        self._house()

    def _house(self) -> None:
        """Give the homeless requests to living engines, if there are any."""
        if all(lane.state != "alive" for lane in self._lanes):
            return
        homeless, self._homeless = self._homeless, []
        for opened in homeless:
            if not opened.sample.done():
                self._assign(opened, self._lanes[self.place([opened.request])])

    def _fail(self, error: Exception) -> None:
        """Everything that is asked for ends with the error, and no engine goes on with it."""
        waiting, self._homeless = self._homeless, []
        for lane in self._lanes:
            numbers = list(lane.open)
            waiting += lane.clear()
            if lane.state == "alive" and numbers:
                lane.dropped = numbers
                self._start_sending(lane)
        for opened in waiting:
            if not opened.sample.done():
                opened.sample.set_exception(error)


def _check_prompt(request: SampleRequest, max_context: int | None) -> None:
    length = len(request.prompt_token_ids)
    if length == 0:
        raise ValueError("a request has an empty prompt")
    if max_context is not None and length >= max_context:
        raise ValueError(
            f"a request's prompt of {length} tokens leaves no room for a response in a context of "
            f"{max_context} (--rollout-max-context-len)"
        )
