"""Rows of files, a block at a time, and their random order without shuffling them. Nothing is read before it
is needed, and a file of any size takes only the memory of the blocks in use: stretches of bytes of a JSONL
file, row groups of a parquet file, record batches of an Arrow file."""

from __future__ import annotations

import bisect
import os
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.data.tokenizer import DataError

Row = dict[str, Any]

LONGEST_LINE = 64 * 1024**2
"""Longest row in bytes; a file with a longer one is not JSONL."""
_MOST_BRACKETS = 2**22
"""Most opening brackets of a row. Text has one in a hundred characters, and a million take a second."""
_BLOCK_BYTES = 256 * 1024
_MOST_BLOCKS = 2**16
_WINDOW_BLOCKS = 64
"""Blocks per window of JSONL: 16 MiB from as many places in the file."""
_READ_BYTES = 4096
_LINE_START = re.compile(rb"\n[ \t\r\v\f]*+(?=[^ \t\r\v\f\n])")
"""The newline before a line that is not blank."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Table(Protocol):
    """Rows in blocks. Every method may raise DataError or OSError for a damaged file."""

    num_blocks: int
    window: int
    """Blocks to shuffle together and hold at one time."""

    def count(self, block: int) -> int:
        """Return the number of rows in the block."""
        ...

    def row(self, block: int, number: int) -> Row:
        """Return row `number`, from 0, of the block. Raises DataError for a row that is not an object."""
        ...

    def location(self, block: int, number: int) -> str:
        """Return the file and line, or row, for messages. May read the file up to there."""
        ...


def parsed_row(line: bytes) -> Row:
    """Return the object on a line of JSONL. Raises DataError if it is not a JSON object, or has too many
    brackets."""
    if num_brackets(line) > _MOST_BRACKETS:
        raise DataError(f"the row has more than {_MOST_BRACKETS:,} brackets")
    try:
        row = read_json(line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8: byte {error.start + 1} of the line is {error.object[error.start]:#04x}"
        ) from error
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"expected a JSON object, found {type(row).__name__}")
    return row


def num_brackets(line: bytes) -> int:
    """Return the number of opening brackets."""
    return line.count(b"[") + line.count(b"{")


def check_encoding(path: Path, start: bytes) -> None:
    """Raise DataError if a file starts as UTF-16."""
    if start[:2] in _UTF16:
        raise DataError(f"{path}: is UTF-16, expected UTF-8; `iconv -f UTF-16 -t UTF-8` converts it")


def first_line(error: object) -> str:
    """Return the first line of what an error or a server says, shortened, or else the error's type."""
    return str(error).partition("\n")[0][:200] or type(error).__name__


class JsonLines:
    """A JSONL file in stretches of bytes: a row belongs to the block in which its line starts."""

    window = _WINDOW_BLOCKS

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        self._block_bytes = max(_BLOCK_BYTES, -(-self._size // _MOST_BLOCKS))
        self.num_blocks = -(-self._size // self._block_bytes)
        self._starts = lru_cache(maxsize=2 * self.window)(self._find_starts)
        check_encoding(path, os.pread(self._file, 2, 0))
        if self._size > LONGEST_LINE:
            self._check_start()

    def _check_start(self) -> None:
        """Refuse a file that is not text, in which one line would be searched to the file's end, or in which
        blank lines would be."""
        try:
            self._line(0)
        except DataError as error:
            raise DataError(f"{self.path}, line 1: {error}") from None
        if not any(map(self.count, range(LONGEST_LINE // self._block_bytes))):
            raise DataError(
                f"{self.path}: no row in the first {LONGEST_LINE // 1024**2} MiB, but blank lines"
            )

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def count(self, block: int) -> int:
        return len(self._starts(block))

    def row(self, block: int, number: int) -> Row:
        return parsed_row(self._line(int(self._starts(block)[number])))

    def location(self, block: int, number: int) -> str:
        offset, line = int(self._starts(block)[number]), 1
        for start in range(0, offset, 1024**2):
            line += os.pread(self._file, min(1024**2, offset - start), start).count(b"\n")
        return f"{self.path}, line {line}"

    def _find_starts(self, block: int) -> npt.NDArray[np.int64]:
        """Return the offsets at which the lines that are not blank start."""
        first = block * self._block_bytes
        last = min(first + self._block_bytes, self._size)
        content = os.pread(self._file, last - max(0, first - 1), max(0, first - 1))
        stretch = content if block else b"\n" + content  # a line starts after another one's newline
        # quick where all is blank, since a file may have gigabytes of this
        matches = _LINE_START.finditer(stretch) if stretch.strip() else ()
        starts = [first + match.start() for match in matches]
        lines, newline, cut_line = stretch.rpartition(b"\n")
        if newline and cut_line and not cut_line.strip() and not self._is_blank(first + len(lines)):
            starts.append(first + len(lines))  # it goes on in the next block
        return np.array(starts, np.int64)

    def _is_blank(self, start: int) -> bool:
        try:
            return not self._line(start).strip()
        except DataError:  # it is too long, which is said where it is read as a row
            return False

    def _line(self, start: int) -> bytes:
        pieces: list[bytes] = []
        position, size = start, _READ_BYTES
        while piece := os.pread(self._file, size, position):
            end = piece.find(b"\n")
            if end >= 0:
                pieces.append(piece[:end])
                break
            pieces.append(piece)
            position += len(piece)
            size = min(2 * size, 1024**2)
            if position - start > LONGEST_LINE:
                raise DataError(f"the line is longer than {LONGEST_LINE // 1024**2} MiB")
        return b"".join(pieces)


class Files:
    """Several tables, one after the other."""

    def __init__(self, tables: Sequence[Table]):
        self._blocks = [(table, block) for table in tables for block in range(table.num_blocks)]
        self.num_blocks = len(self._blocks)
        self.window = max((table.window for table in tables), default=1)

    def count(self, block: int) -> int:
        table, block_in_table = self._blocks[block]
        return table.count(block_in_table)

    def row(self, block: int, number: int) -> Row:
        table, block_in_table = self._blocks[block]
        return table.row(block_in_table, number)

    def location(self, block: int, number: int) -> str:
        table, block_in_table = self._blocks[block]
        return table.location(block_in_table, number)


class WithoutRows:
    """A table without some of its rows, whose numbers are given by block."""

    def __init__(self, table: Table, left_out: dict[int, npt.NDArray[np.int64]]):
        self._table, self._left_out = table, left_out
        self.num_blocks, self.window = table.num_blocks, table.window

    def count(self, block: int) -> int:
        return self._table.count(block) - len(self._left_out.get(block, ()))

    def row(self, block: int, number: int) -> Row:
        return self._table.row(block, self._number(block, number))

    def location(self, block: int, number: int) -> str:
        return self._table.location(block, self._number(block, number))

    def _number(self, block: int, number: int) -> int:
        if block not in self._left_out:
            return number
        return int(np.setdiff1d(np.arange(self._table.count(block)), self._left_out[block])[number])


Place = tuple[int, int]
"""(block, row in it)."""


def shuffled(count: int, *keys: int | str) -> list[int]:
    """Return 0 to count - 1 in an order that depends on `keys` alone."""
    order = list(range(count))
    random.Random(derive_seed(*keys)).shuffle(order)
    return order


class TableOrder:
    """The rows of a table over and over, in a new order every epoch. The rows of each block are counted
    once."""

    def __init__(self, table: Table, seed: int):
        self._table, self._seed = table, seed
        self._counts = np.full(table.num_blocks, -1, np.int64)
        self._epoch = lru_cache(maxsize=2)(self._start_epoch)  # a batch may span two epochs
        self._rows = lru_cache(maxsize=2)(self._shuffled_window)

    def count(self, block: int) -> int:
        """Return the number of rows in the block."""
        if self._counts[block] < 0:
            self._counts[block] = self._table.count(block)
        return int(self._counts[block])

    @cached_property
    def total(self) -> int:
        """Number of rows in all; reads the table through."""
        missing = np.flatnonzero(self._counts < 0).tolist()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            self._counts[missing] = list(threads.map(self._table.count, missing))
        return int(self._counts.sum())

    def places(self) -> Iterator[Place]:
        """Yield the places of all rows, in the order of the file."""
        return ((block, row) for block in range(self._table.num_blocks) for row in range(self.count(block)))

    def place(self, position: int) -> Place:
        """Return the row at a position of the endless order. Raises DataError if the table is damaged, or has
        no rows."""
        epoch, place = 0, position
        while (window := self._window(epoch, place)) is None:
            epoch, place = divmod(position, self.total)
        _, starts = self._epoch(epoch)
        return self._rows(epoch, window)[place - starts[window]]

    def substitute(self, position: int, attempt: int) -> Place | None:
        """Return the row to try after the row at `position` and `attempt` substitutes for it could not be
        used; None: try the next attempt."""
        drawn = derive_seed("substitute", self._seed, position, attempt)
        block = drawn % self._table.num_blocks
        count = self.count(block)
        return (block, derive_seed("row", drawn) % count) if count else None

    def _start_epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the blocks of one pass over the table, and the number of rows before each window, as far as
        it has been read."""
        return shuffled(self._table.num_blocks, "blocks", self._seed, epoch), [0]

    def _window(self, epoch: int, place: int) -> int | None:
        """Return the number of the window with row `place` of the epoch; None if the epoch has fewer rows."""
        _, starts = self._epoch(epoch)
        while starts[-1] <= place:
            blocks = self._blocks(epoch, len(starts) - 1)
            if not blocks:
                return None
            starts.append(starts[-1] + sum(map(self.count, blocks)))
        return bisect.bisect_right(starts, place) - 1

    def _blocks(self, epoch: int, window: int) -> list[int]:
        size = self._table.window
        blocks, _ = self._epoch(epoch)
        return blocks[window * size : (window + 1) * size]

    def _shuffled_window(self, epoch: int, window: int) -> list[Place]:
        places = [
            (block, number) for block in self._blocks(epoch, window) for number in range(self.count(block))
        ]
        return [places[i] for i in shuffled(len(places), "window", self._seed, epoch, window)]
