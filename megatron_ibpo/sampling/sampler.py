"""The only access to engines and verifiers: requests go out as a stream, scored samples come back."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from megatron_ibpo.basics.records import Prompt, Sample, SampleRequest
from megatron_ibpo.basics.text import counted
from megatron_ibpo.engines import AsyncEngine, EngineDiedError, EngineError, EngineLostError
from megatron_ibpo.sampling.episodes import Episodes, unplayed
from megatron_ibpo.sampling.requests import Meter, Score, run_concurrently, with_beginning

TAKE_S = 1.0
"""Seconds that one look at an engine may take."""
KILL_TIMEOUT_S = 5.0
"""Seconds to end a hanging engine, which has a shorter time-out of its own."""
LOOK_S = 0.2
"""Seconds between calls of `meanwhile` during a wait."""
CLOSE_TIMEOUT_S = 10.0

Revive = Callable[[int], Awaitable[AsyncEngine]]
"""Replaces the dead engine with this index by a new one; raises EngineError if impossible."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has no sample yet."""

    request: SampleRequest
    sample: asyncio.Future[Sample]


@dataclass(slots=True, eq=False)
class _Lane:
    """One engine and its unfinished requests."""

    index: int
    engine: AsyncEngine
    state: Literal["alive", "mending", "gone"] = "alive"
    open: dict[int, _Open] = field(default_factory=dict)
    """Number → request, for all requests that the engine has or is about to get."""
    unsent: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Requests whose samples are no longer needed."""
    load: int = 0
    """Most tokens that its requests may still take."""
    sending: asyncio.Task[None] | None = None
    collecting: asyncio.Task[None] | None = None
    mending: asyncio.Task[None] | None = None

    def close(self, number: int) -> _Open | None:
        """Remove and return a request; None if the engine did not have it."""
        opened = self.open.pop(number, None)
        if opened is not None:
            self.load -= opened.request.max_tokens
        return opened

    def clear(self) -> list[_Open]:
        """Remove and return all requests of the engine."""
        opened = list(self.open.values())
        self.open, self.unsent, self.dropped, self.load = {}, [], [], 0
        return opened


class Sampler(AbstractContextManager["Sampler"]):
    """Requests samples from engines and rewards from verifiers.

    Requests are spread by load. Those of one prompt stay together if engines cache shared prefixes.
    Unfinished requests of a dead engine, or one that does not answer at all for `stall_timeout` seconds, are
    repeated at once elsewhere, or by its successor, which joins when it is ready. Every request has its own
    seed, so the result depends neither on the engine nor on the time.

    `run` and `start` use an event loop in the Sampler's own thread, which continues whatever the caller does
    meanwhile; within another event loop the coroutines are used directly.
    """

    def __init__(
        self,
        engines: Sequence[AsyncEngine],
        score: Score,
        *,
        stall_timeout: float,
        max_context: int | None = None,
        prefix_caching: bool = True,
        revive: Revive | None = None,
        episodes: Episodes | None = None,
        needs_masks: bool = False,
    ) -> None:
        """Start with all engines alive.

        Args:
            stall_timeout: --engine-stall-timeout; engines check by themselves whether they write anything.
            max_context: limit of tokens in prompt and response together.
            prefix_caching: engines compute shared prefixes of one prompt's requests only once.
            revive: replaces an engine that died. Without it, or when it raises, sampling ends with the error,
                except that after EngineLostError the other engines continue.
            episodes: plays the episodes of prompts with an environment; None: no prompt has one.
            needs_masks: training needs the sampling mask of samples that top-k or top-p restricted, also
                where a method of the user's asks for them.
        """
        self.version = 0
        """Policy version whose weights, or later ones, the engines must have. Set by the owner of the
        weights."""
        self._lanes = [_Lane(index, engine) for index, engine in enumerate(engines)]
        self._score = score
        self._stall_timeout = stall_timeout
        self._max_context = max_context
        self._prefix_caching = prefix_caching
        self._revive = revive
        self._episodes = episodes
        self._needs_masks = needs_masks
        self._numbers = itertools.count()
        self._homeless: list[_Open] = []
        """Requests that wait until an engine is alive again."""
        self._failure: Exception | None = None
        """Error that ended sampling for good, although other engines may live; raised for later requests."""
        self.on_sample: Callable[[Sample], None] | None = None
        """Called with each sample as an engine returned it, which may be one turn of an episode."""
        self._meter = Meter(len(engines))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------ for callers

    def run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] | None = None) -> T:
        """Run the work, which uses this Sampler, and wait until it is done and no engine has a request left.
        `meanwhile` is called from time to time."""

        async def settled() -> T:
            try:
                return await work
            finally:  # so that nothing is left half done while the loop rests
                await self.settle()

        return self.wait(self.start(settled()), meanwhile)

    def start(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Start the work and return at once."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, started: futures.Future[T], meanwhile: Callable[[], None] | None = None) -> T:
        """Return the result of the work that `started`; cancel it when the wait is interrupted."""
        try:
            while not started.done():
                futures.wait([started], LOOK_S)
                if meanwhile is not None:
                    meanwhile()
            return started.result()
        except BaseException:
            started.cancel()
            raise

    def close(self) -> None:
        """End the event loop and cancel unfinished requests."""
        if self._loop is None or self._thread is None:
            return
        futures.wait([asyncio.run_coroutine_threadsafe(_give_up(), self._loop)], CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of sampling since the last call (`Meter`), and samples_in_flight now."""
        in_flight = len(self._homeless) + sum(len(lane.open) for lane in self._lanes)
        of_episodes = {} if self._episodes is None else self._episodes.take_metrics()
        return self._meter.take() | of_episodes | {"samples_in_flight": float(in_flight)}

    async def answer_all(
        self,
        requests: Sequence[tuple[Prompt, SampleRequest]],
        on_sample: Callable[[int, Sample], None] | None = None,
        *,
        held_out: bool = False,
    ) -> list[Sample]:
        """Return a scored sample for every request, in order; the arguments are as in `answer`."""
        by_prompt: dict[Prompt, list[int]] = {}
        for position, (prompt, _) in enumerate(requests):
            by_prompt.setdefault(prompt, []).append(position)

        samples: dict[int, Sample] = {}

        async def answer_prompt(prompt: Prompt, positions: list[int]) -> None:
            def scored(index: int, sample: Sample) -> None:
                samples[positions[index]] = sample
                if on_sample is not None:
                    on_sample(positions[index], sample)

            prompt_requests = [requests[position][1] for position in positions]
            await self.answer(prompt, prompt_requests, on_sample=scored, held_out=held_out)

        await run_concurrently(answer_prompt(prompt, positions) for prompt, positions in by_prompt.items())
        return [samples[position] for position in range(len(requests))]

    async def answer(
        self,
        prompt: Prompt,
        requests: Sequence[SampleRequest],
        near: int | None = None,
        on_sample: Callable[[int, Sample], None] | None = None,
        *,
        held_out: bool = False,
    ) -> list[Sample]:
        """Return a sample for every request, in order, each scored as soon as it arrives. Raises ValueError
        if a prompt is empty or leaves no room for a response, and EngineError if an engine refused, died and
        cannot be replaced, or lacks a mask that is needed.

        Args:
            near: engine that caches the prefix of these requests (`place`).
            on_sample: called with each sample and its index once it is scored.
            held_out: the prompt is one of evaluation (`Episodes.play`).
        """
        for request in requests:
            _check_prompt(request, self._max_context)
        if self._failure is not None:
            raise self._failure
        if self._prefix_caching:
            engines = [self.place(requests, near)] * len(requests)
        else:
            engines = self.spread(requests)
        tasks = None
        if prompt.environment is None:  # all at once, so that the requests of a group go out together
            tasks = [self._ask(request, engine) for request, engine in zip(requests, engines, strict=True)]

        async def scored(index: int, request: SampleRequest) -> Sample:
            if tasks is None:
                sample = await self._episode(prompt, request, engines[index], held_out)
            else:
                sample = with_beginning(await tasks[index], request.num_begun_tokens)
            if self._needs_masks and not held_out and request.is_cut and sample.sampling_mask is None:
                raise EngineError(
                    "the engine does not record what top-k and top-p left, and the loss reads its log-probs; "
                    "sample without top-k and top-p, or drop what reads them (docs/loss_variants.md)"
                )
            await self._score(prompt, sample)
            if on_sample is not None:
                on_sample(index, sample)
            return sample

        return await run_concurrently(scored(index, request) for index, request in enumerate(requests))

    def place(self, requests: Sequence[SampleRequest], near: int | None = None) -> int:
        """Return the engine with the least load, or `near` if its extra load is below that of these
        requests."""
        lanes = self._working()
        least = min(lanes, key=lambda lane: lane.load)
        if near is not None and self._lanes[near] in lanes:
            ahead = self._lanes[near].load - least.load
            if ahead <= sum(request.max_tokens for request in requests):
                return near
        return least.index

    def spread(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Return an engine for each request, the one with the least load at that point."""
        loads = [(lane.load, lane.index) for lane in self._working()]
        heapq.heapify(loads)
        places = []
        for request in requests:
            load, index = loads[0]
            places.append(index)
            heapq.heapreplace(loads, (load + request.max_tokens, index))
        return places

    def _working(self) -> list[_Lane]:
        return [lane for lane in self._lanes if lane.state == "alive"] or self._lanes

    async def settle(self) -> None:
        """Wait until no engine has a request left. An engine that is being replaced joins when it is
        ready."""
        while tasks := [
            task
            for lane in self._lanes
            for task in (lane.sending, lane.collecting)
            if task is not None and not task.done()
        ]:
            await asyncio.wait(tasks)

    async def _episode(self, prompt: Prompt, request: SampleRequest, engine: int, held_out: bool) -> Sample:
        """Return an episode. Its turns stay near one engine if that caches their prefix."""
        episodes = self._episodes

        async def ask(turn: SampleRequest) -> Sample:
            if self._failure is not None:
                raise self._failure
            return await self._ask(turn, self.place([turn], engine if self._prefix_caching else None))

        if episodes is None:
            sample = unplayed(prompt, request)
        else:
            sample = await episodes.play(prompt, request, ask, held_out=held_out)
        if len(sample.token_ids) == 0:  # no turn was sampled
            sample.versions = ((0, self.version),)
        return sample

    # ------------------------------------------------------------------------------- requests and engines

    def _ask(self, request: SampleRequest, engine: int) -> asyncio.Future[Sample]:
        """Return the sample as a future. Cancelling it takes the request back."""
        opened = _Open(request, asyncio.get_running_loop().create_future())
        self._assign(opened, self._lanes[engine])
        return opened.sample

    def _assign(self, opened: _Open, lane: _Lane) -> None:
        if lane.state != "alive":
            self._homeless.append(opened)
            if self._failure is not None or all(lane.state == "gone" for lane in self._lanes):
                self._fail(self._failure or EngineLostError("no engine is left"))
            return
        number = next(self._numbers)
        lane.open[number] = opened
        lane.unsent.append(number)
        lane.load += opened.request.max_tokens
        opened.sample.add_done_callback(partial(self._take_back, lane, number))
        self._meter.requested(lane.index)
        self._start_sending(lane)
        if lane.collecting is None or lane.collecting.done():
            lane.collecting = asyncio.create_task(self._collect(lane))

    def _take_back(self, lane: _Lane, number: int, sample: asyncio.Future[Sample]) -> None:
        """Abort a request whose sample is no longer needed."""
        if sample.cancelled() and number in lane.open:
            lane.close(number)
            lane.dropped.append(number)
            self._start_sending(lane)

    def _start_sending(self, lane: _Lane) -> None:
        # Requests made before the loop turns go out together: this task runs after their callers.
        if lane.sending is None or lane.sending.done():
            lane.sending = asyncio.create_task(self._send(lane))

    async def _send(self, lane: _Lane) -> None:
        """Send requests and aborts to this engine."""
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
            return  # the collecting task is told as well
        except Exception as error:
            self._fail(error)

    async def _collect(self, lane: _Lane) -> None:
        """Take finished samples of this engine as long as it has requests."""
        clock = asyncio.get_running_loop().time
        while lane.open:
            try:
                finished = await self._take_finished(lane.engine)
            except EngineDiedError as error:
                self._bury(lane, error)
                return
            except Exception as error:
                self._fail(error)
                return
            if finished:
                self._meter.finished(clock())
            for number, sample in finished:
                opened = lane.close(number)
                if self.on_sample is not None:
                    self.on_sample(sample)
                if opened is not None and not opened.sample.done():
                    opened.sample.set_result(sample)

    async def _take_finished(self, engine: AsyncEngine) -> list[tuple[int, Sample]]:
        """Return an engine's finished samples. Raise EngineDiedError if its whole process hangs, since it
        then never reports itself."""
        limit = self._stall_timeout
        try:
            async with asyncio.timeout(limit + TAKE_S):
                return await engine.take(TAKE_S)
        except TimeoutError:
            reason = f"no answer within {limit:g} seconds (--engine-stall-timeout)"
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await engine.kill(reason)
        raise EngineDiedError(reason)

    def _bury(self, lane: _Lane, error: EngineDiedError) -> None:
        """Repeat a dead engine's requests elsewhere, if another one is alive, and have it replaced."""
        lane.state = "mending"
        orphans = [opened for opened in lane.clear() if not opened.sample.done()]
        num_requests = counted(len(orphans), "request")
        log.warning("engine %d died; %s sent to other engines: %s", lane.index, num_requests, error)
        self._meter.died(len(orphans))
        self._homeless += orphans
        self._house()
        lane.mending = asyncio.create_task(self._mend(lane, error))

    async def _mend(self, lane: _Lane, error: EngineDiedError) -> None:
        if lane.sending is not None:  # it must not reach the successor
            lane.sending.cancel()
            await asyncio.wait([lane.sending])
        try:
            if self._revive is None:
                raise EngineError(f"engine {lane.index} died: {error}")
            lane.engine = await self._revive(lane.index)
        except Exception as failure:
            lane.state = "gone"
            log.warning("engine %d is not replaced: %s", lane.index, failure)
            if not isinstance(failure, EngineLostError):
                self._failure = failure
            if self._failure is not None or all(lane.state == "gone" for lane in self._lanes):
                self._fail(failure)
            return
        lane.state = "alive"
        self._house()

    def _house(self) -> None:
        """Give waiting requests to living engines, if there are any."""
        if all(lane.state != "alive" for lane in self._lanes):
            return
        homeless, self._homeless = self._homeless, []
        for opened in homeless:
            if not opened.sample.done():
                self._assign(opened, self._lanes[self.place([opened.request])])

    def _fail(self, error: Exception) -> None:
        """End all requests with the error, and abort them in the engines."""
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


async def _give_up() -> None:
    """Cancel everything in this event loop, and tasks that start because of that."""
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_prompt(request: SampleRequest, max_context: int | None) -> None:
    length = len(request.prompt_token_ids)
    if length == 0:
        raise ValueError("a request has an empty prompt")
    if max_context is not None and length >= max_context:
        raise ValueError(
            f"a request's prompt of {length} tokens leaves no room for a response in a context of "
            f"{max_context} (--rollout-max-context-len)"
        )
