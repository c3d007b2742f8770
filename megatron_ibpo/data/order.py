"""The order of prompts: the rows of a table in a random order that is found without shuffling it, and several
sources as one, in which the position alone determines the source and its row."""

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.data.prompts import PromptSource
from megatron_ibpo.data.tables import RowCounts, Table

LONGEST_CYCLE = 10_000
"""Longest cycle of the pattern of sources, in positions; shares are exact to this fraction."""


def mixed(sources: Sequence[PromptSource], weights: Sequence[Fraction]) -> PromptSource:
    """Mix the prompts of all sources in proportion to the weights, each source in its own order.

    The pattern repeats after a cycle. Within it, each share is off by at most one prompt of a source per
    other source.
    """
    counts = cycle_counts(weights)
    cycle = np.array(interleaved(counts))
    length = len(cycle)
    rank = np.zeros(length, np.int64)
    """Number of earlier positions in the cycle with the same source, by position."""
    for number in range(len(sources)):
        from_source = cycle == number
        rank[from_source] = np.arange(from_source.sum())

    def at(position: int) -> Prompt:
        turn, place = divmod(position, length)
        number = int(cycle[place])
        source_position = turn * counts[number] + int(rank[place])
        return replace(sources[number].at(source_position), index=position)

    def count() -> int:
        """Return the positions until every source has given all its prompts; 0 if one never does."""
        sizes = [source.num_prompts() for source in sources]
        if not all(sizes):
            return 0
        return max(_position_of(size - 1, cycle, number) + 1 for number, size in enumerate(sizes))

    return PromptSource(
        at,
        count=count,
        notes=tuple(note for source in sources for note in source.notes),
        tallies=tuple(tally for source in sources for tally in source.tallies),
        ready=min(
            (
                _position_of(source.ready, cycle, number)
                for number, source in enumerate(sources)
                if source.ready is not None
            ),
            default=None,
        ),
        grows=any(source.grows for source in sources),
    )


def cycle_counts(weights: Sequence[Fraction]) -> list[int]:
    """Return how often each source comes in a cycle. The shares are exact if a cycle of at most LONGEST_CYCLE
    can hold them, else rounded (largest remainder); every source comes at least once."""
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST_CYCLE:
        return [int(share * length) for share in shares]
    counts = [max(1, math.floor(share * LONGEST_CYCLE)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * LONGEST_CYCLE)
    for number in by_remainder[: max(0, LONGEST_CYCLE - sum(counts))]:
        counts[number] += 1
    return counts


def interleaved(counts: Sequence[int]) -> list[int]:
    """Return an order with source i counts[i] times, spread evenly: each next position goes to the source
    that is furthest behind (smooth weighted round robin)."""
    length, behind, order = sum(counts), [0] * len(counts), []
    for _ in range(length):
        behind = [value + count for value, count in zip(behind, counts, strict=True)]
        chosen = max(range(len(counts)), key=behind.__getitem__)
        behind[chosen] -= length
        order.append(chosen)
    return order


def _position_of(place_in_source: int, cycle: np.ndarray, source: int) -> int:
    """Return the position at which prompt `place_in_source` of a source comes."""
    places = np.flatnonzero(cycle == source)
    turn, rank = divmod(place_in_source, len(places))
    return turn * len(cycle) + int(places[rank])


Place = tuple[int, int]
"""(block, row in it)."""


def shuffled(count: int, *keys: int | str) -> list[int]:
    """Return 0 to count - 1 in an order that depends on `keys` alone."""
    order = list(range(count))
    random.Random(derive_seed(*keys)).shuffle(order)
    return order


@dataclass
class _Epoch:
    """One pass over the table, as far as it has been read."""

    blocks: list[int]
    ends: list[int] = field(default_factory=list)
    """Number of rows up to the end of each window."""


class TableOrder:
    """The rows of a table over and over, in a new order every epoch."""

    def __init__(self, table: Table, seed: int):
        self.counted = RowCounts(table)
        self._table, self._seed = table, seed
        self._epoch = lru_cache(maxsize=2)(self._start_epoch)  # a batch may span two epochs
        self._rows = lru_cache(maxsize=2)(self._shuffled_window)

    def place(self, position: int) -> Place:
        """Return the row at a position of the endless order. Raises DataError if the table is damaged, or has
        no rows."""
        epoch, place = 0, position
        while (window := self._window(epoch, place)) is None:
            total = self.counted.total
            epoch, place = divmod(position, total)
        window_start = self._epoch(epoch).ends[window - 1] if window else 0
        return self._rows(epoch, window)[place - window_start]

    def substitute(self, position: int, attempt: int) -> Place | None:
        """Return the row to try after the row at `position` and `attempt` substitutes for it could not be
        used; None: try the next attempt."""
        drawn = derive_seed("substitute", self._seed, position, attempt)
        block = drawn % self._table.num_blocks
        count = self.counted[block]
        return (block, derive_seed("row", drawn) % count) if count else None

    def _start_epoch(self, epoch: int) -> _Epoch:
        return _Epoch(shuffled(self._table.num_blocks, "blocks", self._seed, epoch))

    def _window(self, epoch: int, place: int) -> int | None:
        """Return the number of the window with row `place` of the epoch; None if the epoch has fewer rows."""
        epoch_order = self._epoch(epoch)
        while not epoch_order.ends or epoch_order.ends[-1] <= place:
            blocks = self._blocks(epoch, len(epoch_order.ends))
            if not blocks:
                return None
            total = epoch_order.ends[-1] if epoch_order.ends else 0
            epoch_order.ends.append(total + sum(self.counted[block] for block in blocks))
        return bisect.bisect_right(epoch_order.ends, place)

    def _blocks(self, epoch: int, window: int) -> list[int]:
        size = self._table.window
        return self._epoch(epoch).blocks[window * size : (window + 1) * size]

    def _shuffled_window(self, epoch: int, window: int) -> list[Place]:
        places = [
            (block, number) for block in self._blocks(epoch, window) for number in range(self.counted[block])
        ]
        return [places[i] for i in shuffled(len(places), "window", self._seed, epoch, window)]
