"""Sampling ahead of training: groups in flight for coming batches, and the choice of groups for a batch."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest
from megatron_ibpo.credit import CreditContext
from megatron_ibpo.credit.metrics import sampled_metrics
from megatron_ibpo.journal import DroppedGroup
from megatron_ibpo.sampling.groups import EXPIRED, Batch, Drawn, GroupSampler

DrawPrompt = Callable[[int, int], tuple[Prompt, Sequence[SampleRequest], CreditContext]]
"""(ordinal, attempt) → (the prompt, the requests for its responses, the context for drawing its
corrections)."""


@dataclass(frozen=True)
class Pace:
    """Limits of sampling ahead of training."""

    staleness: int
    """S: most steps by which the oldest weights behind a batch may be older than those that it trains."""
    over_sampling: int = 0
    """Groups in flight beyond those that the batches within S steps take. With it, a batch takes the first
    groups to complete, and does not wait for those that will be too old for the next batch."""
    keep_order: bool = False
    """Take groups in the order of their prompts."""
    last_step: int | None = None
    """Number of batches after which no more groups are requested; None: no end."""


_State = Literal["flying", "ready", "spare", "refused"]


@dataclass(eq=False)
class _Flight:
    """A group in flight."""

    ordinal: int
    """Position of its prompt in the source's stream."""
    attempt: int
    version: int
    """Version of the oldest weights that may have sampled a part of it."""
    samples: list[Sample] = field(default_factory=list)
    drawn: Drawn | None = None
    """The group, once its responses are scored."""
    state: _State = "flying"
    """State of the group. `spare`: not preferred, for a batch that finds nothing better."""
    too_old: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.ordinal, self.attempt


class Ahead:
    """Keeps engines busy with the groups of coming batches, within a bound on their age.

    While the engines have the weights of version v and batch b is the next to be taken (it trains version b),
    at most (v + S - b + 1) batches of groups are in flight: groups requested now will be trained on by step v
    + S. A batch is taken as soon as enough groups are complete, the oldest first. It waits for groups that
    would otherwise become too old, so without over-sampling no group is ever dropped. With over-sampling, the
    batch takes the first groups to complete, and those that become too old are aborted, counted, and
    requested again. All methods run in one event loop.
    """

    def __init__(self, groups: GroupSampler, draw: DrawPrompt, pace: Pace, *, version: int) -> None:
        """Start with no group in flight. `version` is that of the engines' weights; as many batches have been
        taken."""
        self._groups, self._draw, self._pace = groups, draw, pace
        self._version = self._next = version
        self._num_groups = groups.rules.num_groups
        self._cursor = version * self._num_groups
        self._again: deque[tuple[int, int]] = deque()
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._tally: Counter[tuple[_State, int]] = Counter()
        """Number of groups by state and version, so that a finished group need not look at all of them."""
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._unwanted = 0
        """Groups since the last batch that were refused, or not preferred."""
        self._left: list[_Flight] = []
        """Groups sampled since then that will never be trained on."""
        self._counts = {"groups_expired": 0, "groups_refused": 0, "tokens_discarded": 0}
        self._untold: list[tuple[list[int], list[_Flight]]] = []
        """(lengths of its responses, groups that were in flight with it) of each batch whose bias is not
        known yet, because some of these groups have not finished."""
        self._length_bias: float | None = None

    async def resume(self, cursor: int, under_way: Sequence[tuple[int, int, int]]) -> None:
        """Continue from the state of an earlier process: `cursor` is the position of the first prompt that
        was never requested, and `under_way` has (ordinal, attempt, version) of groups that are in no batch
        yet."""
        self._cursor = cursor
        for ordinal, attempt, version in under_way:
            self._ask(ordinal, attempt, version)

    async def advance(self, version: int) -> None:
        """Note that the engines now have the weights of `version`."""
        self._version = version
        self._fill()

    async def batch(self) -> Batch:
        """Return the next batch, once it is complete. Raises ValueError if no group is usable or a prompt
        leaves no room for a response, and EngineError if sampling has ended for good."""
        self._fill()
        while True:
            self._news.clear()
            if self._failure is not None:
                raise self._failure
            await self._fill_up_with_spares()
            if (chosen := self._choose()) is not None:
                return self._take(chosen)
            await self._news.wait()

    async def close(self) -> None:
        """Cancel the groups in flight."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------------- requests

    @property
    def _room(self) -> int:
        """Number of groups that may be in flight."""
        ahead = self._version + self._pace.staleness + 1
        if self._pace.last_step is not None:
            ahead = min(ahead, self._pace.last_step)
        batches = ahead - self._next
        return batches * self._num_groups + self._pace.over_sampling if batches > 0 else 0

    @property
    def _exhausted(self) -> bool:
        """True if so many groups were unwanted that the batch must use the existing ones."""
        return self._unwanted >= self._groups.rules.max_rounds * self._num_groups

    def _fill(self) -> None:
        if self._exhausted:
            return
        for _ in range(self._room - self._number("flying", "ready")):
            if self._again:
                ordinal, attempt = self._again.popleft()
            else:
                ordinal, attempt = self._cursor, 0
                self._cursor += 1
            self._ask(ordinal, attempt, self._version)

    def _ask(self, ordinal: int, attempt: int, version: int) -> None:
        flight = _Flight(ordinal, attempt, version)
        self._flights[flight.key] = flight
        self._tally[flight.state, flight.version] += 1
        flight.task = asyncio.create_task(self._fly(flight))

    def _move(self, flight: _Flight, state: _State, version: int) -> None:
        self._uncount(flight)
        flight.state, flight.version = state, version
        self._tally[state, version] += 1

    def _remove(self, flight: _Flight) -> None:
        del self._flights[flight.key]
        self._uncount(flight)

    def _uncount(self, flight: _Flight) -> None:
        place = flight.state, flight.version
        self._tally[place] -= 1
        if not self._tally[place]:
            del self._tally[place]

    def _number(self, *states: _State, oldest: int | None = None) -> int:
        """Return the number of groups in these states; with `oldest`, only those with no newer weights."""
        return sum(
            count
            for (state, version), count in self._tally.items()
            if state in states and (oldest is None or version <= oldest)
        )

    async def _fly(self, flight: _Flight) -> None:
        try:
            prompt, requests, context = self._draw(flight.ordinal, flight.attempt)
            drawn = await self._groups.respond(prompt, requests, flight.attempt, flight.samples.append)
            flight.drawn = drawn
            self._move(flight, "flying", drawn.group.policy_version)
            await self._groups.reconsider(drawn, context)
            if drawn.is_accepted:
                if not drawn.is_followed_up:
                    await self._groups.follow_up(drawn, context)
                self._move(flight, "ready", flight.version)
            else:
                self._move(flight, "spare" if drawn.usable else "refused", flight.version)
                self._unwanted += 1
                self._fill()
        except Exception as error:
            self._failure = error
        self._news.set()

    # ---------------------------------------------------------------------------------------- batches

    def _choose(self) -> list[_Flight] | None:
        """Return the groups of the next batch; None while it has to wait."""
        if self._exhausted and not self._number("flying"):
            return self._ready()[: self._num_groups]  # perhaps fewer than a batch needs
        if self._number("ready") < self._num_groups:
            return None
        if self._pace.keep_order:
            return self._first_in_order()
        if not self._pace.over_sampling and not self._leaves_time():
            return None
        return sorted(self._ready(), key=lambda flight: (flight.version, flight.key))[: self._num_groups]

    def _ready(self) -> list[_Flight]:
        return [flight for flight in self._flights.values() if flight.state == "ready"]

    def _first_in_order(self) -> list[_Flight] | None:
        waiting = [flight.key for flight in self._flights.values() if flight.state == "flying"]
        first_missing = min(waiting, default=None)
        ready = sorted(self._ready(), key=lambda flight: flight.key)
        chosen = [f for f in ready if first_missing is None or f.key < first_missing][: self._num_groups]
        return chosen if len(chosen) == self._num_groups else None

    def _leaves_time(self) -> bool:
        """Return whether, once this batch takes the oldest ready groups, coming batches can take every other
        group before it is too old."""
        for steps in range(self._pace.staleness + 1):
            oldest = self._next + steps - self._pace.staleness
            num_taken = min(self._num_groups, self._number("ready", oldest=oldest))
            if self._number("flying", "ready", oldest=oldest) - num_taken > steps * self._num_groups:
                return False
        return True

    async def _fill_up_with_spares(self) -> None:
        """Take groups that are not preferred if no better ones are available."""
        if not self._exhausted or self._number("flying"):
            return
        spares = [flight for flight in self._flights.values() if flight.state == "spare"]
        for flight in spares[: max(0, self._num_groups - self._number("ready"))]:
            assert flight.drawn is not None
            if not flight.drawn.is_followed_up:
                context = self._draw(flight.ordinal, flight.attempt)[2]
                await self._groups.follow_up(flight.drawn, context)
            self._move(flight, "ready", flight.version)
        if not self._number("ready"):
            raise ValueError(
                f"--group-filter refused all {self._unwanted} groups that were sampled for a batch; let it "
                "accept more, or raise --dynamic-sampling-rounds"
            )

    def _take(self, chosen: list[_Flight]) -> Batch:
        for flight in chosen:
            self._remove(flight)
        later = [f for f in self._flights.values() if f.state in ("flying", "ready")]
        groups = [flight.drawn.group for flight in chosen if flight.drawn is not None]
        lengths = [len(response.token_ids) for group in groups for response in group.responses]
        self._untold.append((lengths, later))
        self._next += 1
        self._expire()
        dropped = tuple(
            DroppedGroup(*flight.key, EXPIRED if flight.too_old else "not taken") for flight in self._left
        )
        leftover_groups = [flight.drawn.group for flight in self._left if flight.drawn is not None]
        metrics = self._metrics(groups) | sampled_metrics([*groups, *leftover_groups])
        sampled = [sample for flight in [*chosen, *self._left] for sample in flight.samples]
        in_order = sorted(zip(chosen, groups, strict=True), key=lambda pair: pair[0].key)
        self._left = []
        self._fill()
        attempts = tuple(flight.attempt for flight, _ in in_order)
        return Batch([group for _, group in in_order], sampled, metrics, attempts, dropped)

    def _expire(self) -> None:
        """Drop groups too old for the next batch, and groups that this batch refused."""
        too_old = self._next - self._pace.staleness
        for flight in list(self._flights.values()):
            refused = flight.state in ("refused", "spare")
            flight.too_old = flight.version < too_old and not refused
            if not flight.too_old and not refused:
                continue
            self._remove(flight)
            self._left.append(flight)
            if flight.task is not None:
                flight.task.cancel()
            self._counts["groups_refused" if refused else "groups_expired"] += 1
            self._counts["tokens_discarded"] += sum(len(sample.token_ids) for sample in flight.samples)
            if not refused:
                self._again.append((flight.ordinal, flight.attempt + 1))
        self._unwanted = 0

    def _metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        step = self._next - 1
        samples = [sample for group in groups for sample in group.samples]
        ages = [
            (step - version, count) for sample in samples for version, count in sample.tokens_by_version()
        ]
        metrics = {
            "staleness_max": float(max(age for age, _ in ages)),
            "staleness_mean": sum(age * count for age, count in ages) / sum(count for _, count in ages),
            "partial_rollouts": float(sum(len(sample.versions) > 1 for sample in samples)),
            "groups_missing": float(self._num_groups - len(groups)),
            **{name: float(count) for name, count in self._counts.items()},
            "groups_in_flight": float(self._number("flying")),
            "groups_buffered": float(self._number("ready", "spare")),
        }
        self._counts = dict.fromkeys(self._counts, 0)
        self._tell_bias()
        if self._length_bias is not None:
            metrics["length_bias"] = self._length_bias
        return metrics

    def _tell_bias(self) -> None:
        """Report the last length bias that is known, as all groups in flight with its batch have ended."""
        under_way = {flight for flight in self._flights.values() if flight.state == "flying"}
        while self._untold and under_way.isdisjoint(self._untold[0][1]):
            lengths, flights = self._untold.pop(0)
            later = [len(r.token_ids) for f in flights if f.drawn for r in f.drawn.group.responses]
            self._length_bias = float(np.mean(lengths) / np.mean([*lengths, *later]))
