"""The order of a table's rows: the row at a position is a function of the position alone, found without
reading the table through.

An epoch is a permutation of the blocks; consecutive blocks form windows, and the rows of a window are
shuffled together. A window is found by counting the rows of the windows before it, which have been used by
then. Every row comes once per epoch.
"""

import bisect
import random
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.data.tables import RowCounts, Table

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
        """Return the row at a position of the endless order.

        Raises:
            DataError: the table is damaged, or has no rows.
        """
        epoch, rest = 0, position
        while (window := self._window(epoch, rest)) is None:
            total = self.counted.total
            epoch, rest = divmod(position, total)
        before = self._epoch(epoch).ends[window - 1] if window else 0
        return self._rows(epoch, window)[rest - before]

    def substitute(self, position: int, attempt: int) -> Place | None:
        """Return a row to try when neither the one at `position` nor `attempt` substitutes can be used; None:
        try the next attempt."""
        drawn = derive_seed("substitute", self._seed, position, attempt)
        block = drawn % self._table.num_blocks
        count = self.counted[block]
        return (block, derive_seed("row", drawn) % count) if count else None

    def _start_epoch(self, epoch: int) -> _Epoch:
        return _Epoch(shuffled(self._table.num_blocks, "blocks", self._seed, epoch))

    def _window(self, epoch: int, rest: int) -> int | None:
        """Return the number of the window with row `rest` of the epoch; None if the epoch has fewer rows."""
        found = self._epoch(epoch)
        while not found.ends or found.ends[-1] <= rest:
            blocks = self._blocks(epoch, len(found.ends))
            if not blocks:
                return None
            before = found.ends[-1] if found.ends else 0
            found.ends.append(before + sum(self.counted[block] for block in blocks))
        return bisect.bisect_right(found.ends, rest)

    def _blocks(self, epoch: int, window: int) -> list[int]:
        size = self._table.window
        return self._epoch(epoch).blocks[window * size : (window + 1) * size]

    def _shuffled_window(self, epoch: int, window: int) -> list[Place]:
        places = [
            (block, number) for block in self._blocks(epoch, window) for number in range(self.counted[block])
        ]
        return [places[i] for i in shuffled(len(places), "window", self._seed, epoch, window)]
