"""Which row of a table comes at which position: a function of the position alone, found without reading the
table through.

An epoch is a permutation of the blocks; the rows of some blocks in a row of it (a window) are shuffled
together. So a window is found by counting the rows of those before it, which have been used by then, and
every row comes once an epoch.
"""

import bisect
import random
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.data.tables import Counted, Table

Place = tuple[int, int]
"""(block, row of it)."""


def shuffled(count: int, *keys: int | str) -> list[int]:
    """0 to count - 1 in an order that depends on `keys` alone."""
    order = list(range(count))
    random.Random(derive_seed(*keys)).shuffle(order)
    return order


@dataclass
class _Epoch:
    """One time through the table, as far as it has been looked at."""

    blocks: list[int]
    ends: list[int] = field(default_factory=list)
    """How many rows the windows have up to the end of each."""


class TableOrder:
    """The rows of a table over and over, in a new order every epoch."""

    def __init__(self, table: Table, seed: int):
        self.counted = Counted(table)
        self._table, self._seed = table, seed
        self._epoch = lru_cache(maxsize=2)(self._start_epoch)  # a batch may span two epochs
        self._rows = lru_cache(maxsize=2)(self._shuffled_window)

    def place(self, position: int) -> Place:
        """The row at a position of the endless order.

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
        """A row to try where the one at `position` cannot be used and `attempt` others neither; None: another
        attempt."""
        drawn = derive_seed("substitute", self._seed, position, attempt)
        block = drawn % self._table.num_blocks
        count = self.counted[block]
        return (block, derive_seed("row", drawn) % count) if count else None

    def _start_epoch(self, epoch: int) -> _Epoch:
        return _Epoch(shuffled(self._table.num_blocks, "blocks", self._seed, epoch))

    def _window(self, epoch: int, rest: int) -> int | None:
        """Number of the window with row `rest` of the epoch; None where the epoch has fewer rows."""
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
