"""Rows of files, a block at a time. Nothing is read before it is needed, and a file of any size takes only
the memory of the blocks in use.

A block is a stretch of bytes of a JSONL file, a row group of a parquet file or a record batch of an Arrow
file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.data.tokenizer import DataError

Row = dict[str, Any]

LONGEST_LINE = 64 * 1024**2
"""Longest row in bytes; a file with a longer one is not JSONL."""
WINDOW_ROWS = 16_384
"""Approximate rows shuffled together: many batches' worth, and little memory."""
_BLOCK_BYTES = 256 * 1024
_MOST_BLOCKS = 2**16
_WINDOW_BLOCKS = 64
"""Blocks per window of JSONL: 16 MiB from as many places in the file."""
_READ_BYTES = 4096
_NEWLINE = 10
_BLANKS = np.frombuffer(b" \t\r\n\v\f", np.uint8)
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

    def where(self, block: int, number: int) -> str:
        """Return the file and line, or row, for messages. May read the file up to there."""
        ...


def parsed_row(line: bytes) -> Row:
    """Return the object on a line of JSONL.

    Raises:
        DataError: the line is not a JSON object.
    """
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


def check_encoding(path: Path, start: bytes) -> None:
    """Raise DataError if a file starts as UTF-16."""
    if start[:2] in _UTF16:
        raise DataError(f"{path}: is UTF-16, expected UTF-8; `iconv -f UTF-16 -t UTF-8` converts it")


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
        if (
            self._size > LONGEST_LINE
        ):  # in a file that is not text, one line would be searched to the file's end
            self._check_first_line()

    def _check_first_line(self) -> None:
        try:
            self._line(0)
        except DataError as error:
            raise DataError(f"{self.path}, line 1: {error}") from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def count(self, block: int) -> int:
        return len(self._starts(block))

    def row(self, block: int, number: int) -> Row:
        return parsed_row(self._line(int(self._starts(block)[number])))

    def where(self, block: int, number: int) -> str:
        before, line = int(self._starts(block)[number]), 1
        for start in range(0, before, 1024**2):
            line += os.pread(self._file, min(1024**2, before - start), start).count(b"\n")
        return f"{self.path}, line {line}"

    def _find_starts(self, block: int) -> npt.NDArray[np.int64]:
        """Return the offsets at which the lines that are not blank start."""
        first = block * self._block_bytes
        last = min(first + self._block_bytes, self._size)
        before = max(0, first - 1)  # a line starts after another one's newline
        content = np.frombuffer(os.pread(self._file, last - before, before), np.uint8)
        starts = np.flatnonzero(content[:-1] == _NEWLINE) + before + 1
        if block == 0:
            starts = np.concatenate([[0], starts])
        suspects = starts[np.isin(content[starts - before], _BLANKS)]
        blank = [start for start in suspects.tolist() if not self._line(start).strip()]
        return np.setdiff1d(starts, blank, assume_unique=True).astype(np.int64) if blank else starts

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


class Parquet:
    """A parquet file in row groups."""

    def __init__(self, path: Path, columns: Sequence[str]):
        """
        Args:
            columns: columns that may be needed; others are never decoded.
        """
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"{path}: not a parquet file, or cut off ({_first_line(error)})") from error
        self._columns = [name for name in self._file.schema_arrow.names if name in columns]
        if not self._columns:
            found = ", ".join(self._file.schema_arrow.names[:20])
            raise DataError(f"{path}: has none of the columns {', '.join(columns)} (found: {found})")
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_blocks = len(counts)
        self.window = _window(self.num_blocks, int(self._first[-1]))
        self._group = lru_cache(maxsize=self.window + 1)(self._read_group)

    def count(self, block: int) -> int:
        return int(self._first[block + 1] - self._first[block])

    def row(self, block: int, number: int) -> Row:
        return _as_row(self._group(block).slice(number, 1))

    def where(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"

    def _read_group(self, block: int) -> Any:
        import pyarrow

        try:
            return self._file.read_row_group(block, columns=self._columns, use_threads=False)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"row group {block} cannot be read ({_first_line(error)})") from error


class ArrowFile:
    """An Arrow file of a Hugging Face data set on disk, in record batches. It is mapped, not read."""

    def __init__(self, path: Path, columns: Sequence[str]):
        """
        Args:
            columns: columns that may be needed.
        """
        import pyarrow

        self.path = path
        try:
            self._batches = _record_batches(path)
        except (pyarrow.ArrowException, OSError, EOFError, ValueError, MemoryError) as error:
            raise DataError(f"{path}: not an Arrow file, or cut off ({_first_line(error)})") from error
        self._columns = columns
        self._first = np.concatenate(
            [[0], np.cumsum([len(batch) for batch in self._batches], dtype=np.int64)]
        )
        self.num_blocks = len(self._batches)
        self.window = _window(self.num_blocks, int(self._first[-1]))
        self._batch = lru_cache(maxsize=self.window + 1)(self._validated)

    def count(self, block: int) -> int:
        return len(self._batches[block])

    def row(self, block: int, number: int) -> Row:
        return _as_row(self._batch(block).slice(number, 1))

    def where(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"

    def _validated(self, block: int) -> Any:
        """Return the batch after checking that none of its offsets point outside; the library trusts what it
        maps."""
        import pyarrow

        batch = self._batches[block]
        try:
            kept = batch.select([name for name in batch.schema.names if name in self._columns])
            kept.validate(full=True)
        except (pyarrow.ArrowException, ValueError) as error:
            raise DataError(f"record batch {block} is damaged ({_first_line(error)})") from error
        return kept


class Files:
    """Several tables, one after the other."""

    def __init__(self, tables: Sequence[Table]):
        self._tables = tables
        self._first = np.concatenate([[0], np.cumsum([table.num_blocks for table in tables])])
        self.num_blocks = int(self._first[-1])
        self.window = max((table.window for table in tables), default=1)

    def count(self, block: int) -> int:
        table, own = self._own(block)
        return table.count(own)

    def row(self, block: int, number: int) -> Row:
        table, own = self._own(block)
        return table.row(own, number)

    def where(self, block: int, number: int) -> str:
        table, own = self._own(block)
        return table.where(own, number)

    def _own(self, block: int) -> tuple[Table, int]:
        index = int(np.searchsorted(self._first, block, side="right")) - 1
        return self._tables[index], block - int(self._first[index])


class WithoutRows:
    """A table without some of its rows."""

    def __init__(self, table: Table, left_out: dict[int, npt.NDArray[np.int64]]):
        """
        Args:
            left_out: numbers of the left-out rows, by block.
        """
        self._table, self._left_out = table, left_out
        self.num_blocks, self.window = table.num_blocks, table.window

    def count(self, block: int) -> int:
        return self._table.count(block) - len(self._left_out.get(block, ()))

    def row(self, block: int, number: int) -> Row:
        return self._table.row(block, self._number(block, number))

    def where(self, block: int, number: int) -> str:
        return self._table.where(block, self._number(block, number))

    def _number(self, block: int, number: int) -> int:
        if block not in self._left_out:
            return number
        return int(np.setdiff1d(np.arange(self._table.count(block)), self._left_out[block])[number])


class RowCounts:
    """The numbers of rows in a table's blocks, each counted once."""

    def __init__(self, table: Table):
        self._table = table
        self._known = np.full(table.num_blocks, -1, np.int64)

    def __getitem__(self, block: int) -> int:
        if self._known[block] < 0:
            self._known[block] = self._table.count(block)
        return int(self._known[block])

    @cached_property
    def total(self) -> int:
        """Number of rows in all; reads the table through."""
        missing = np.flatnonzero(self._known < 0).tolist()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            self._known[missing] = list(threads.map(self._table.count, missing))
        return int(self._known.sum())


def _as_row(table: Any) -> Row:
    """Return the row of a table with one row."""
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.object[:40]!r}") from error
    if not rows:
        raise DataError("the file is damaged: it counts more rows than it has")
    return rows[0]


def _record_batches(path: Path) -> list[Any]:
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    try:
        return list(pyarrow.ipc.open_stream(mapped))
    except pyarrow.ArrowInvalid:
        reader = pyarrow.ipc.open_file(mapped)
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _window(num_blocks: int, rows: int) -> int:
    return min(max(1, round(WINDOW_ROWS * num_blocks / max(1, rows))), max(1, num_blocks))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
