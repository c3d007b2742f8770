"""Rows of files, a block at a time. Nothing is read before it is needed, and a file of any size takes only
the memory of the blocks in use.

A block is a stretch of bytes of a JSONL file, a row group of a parquet file or a record batch of an Arrow
file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.data.arrow_sizes import is_compressed, largest_row
from megatron_ibpo.data.tokenizer import DataError

Row = dict[str, Any]

LONGEST_LINE = 64 * 1024**2
"""Longest row in bytes; a file with a longer one is not JSONL."""
_MOST_BRACKETS = 2**22
"""Most opening brackets of a row. Text has one in a hundred characters, and a million take a second."""
WINDOW_ROWS = 16_384
"""Approximate rows shuffled together: many batches' worth, and little memory."""
WINDOW_BYTES = 4 * 1024**3
"""Most memory of the row groups of one parquet file that are held at one time."""
_MOST_GROUP_ROWS, _MOST_GROUP_VALUES = 2**22, 2**26
"""Most rows of a row group, and most values of one of its columns."""
_BLOCK_BYTES = 256 * 1024
_MOST_BLOCKS = 2**16
_WINDOW_BLOCKS = 64
"""Blocks per window of JSONL: 16 MiB from as many places in the file."""
_READ_BYTES = 4096
_NEWLINE = 10
_BLANKS = np.frombuffer(b" \t\r\n\v\f", np.uint8)
_ARROW_MAGIC, _ARROW_PADDING = b"ARROW1", 8
"""Beginning of an Arrow file that is no stream, and where its messages start."""
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
        DataError: the line is not a JSON object, or has too many brackets.
    """
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
        stretch = os.pread(self._file, last - before, before)
        if not stretch.strip():  # quick, since a file may have gigabytes of this
            return self._start_after_blanks(stretch, before, is_first=block == 0)
        content = np.frombuffer(stretch, np.uint8)
        starts = np.flatnonzero(content[:-1] == _NEWLINE) + before + 1
        if block == 0:
            starts = np.concatenate([[0], starts])
        return starts[~self._are_blank(starts, content, before)]

    def _start_after_blanks(self, stretch: bytes, before: int, *, is_first: bool) -> npt.NDArray[np.int64]:
        """Return the offset of the one line that may not be blank: the last, if it goes on in the next
        block."""
        newline = stretch.rfind(b"\n", 0, -1)
        starts = [before + newline + 1] if newline >= 0 or is_first else []
        return np.array([start for start in starts if not self._is_blank(start)], np.int64)

    def _are_blank(
        self, starts: npt.NDArray[np.int64], content: npt.NDArray[np.uint8], before: int
    ) -> npt.NDArray[np.bool_]:
        """Return whether each line is blank: whether nothing else stands before the next line."""
        if not np.isin(content[starts - before], _BLANKS).any():
            return np.zeros(len(starts), np.bool_)
        letters = np.append(np.flatnonzero(~np.isin(content, _BLANKS)), len(content)) + before
        next_letters = letters[np.searchsorted(letters, starts)]
        blank = next_letters >= np.append(starts[1:], before + len(content))
        if len(starts) and blank[-1]:  # the last line goes on in the next block
            blank[-1] = self._is_blank(int(starts[-1]))
        return blank

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


class Parquet:
    """A parquet file in row groups."""

    def __init__(self, path: Path, columns: Sequence[str] | None = None):
        """
        Args:
            columns: columns that may be needed; others are never decoded. None: all.
        """
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            metadata = parquet.read_metadata(path)
            leaves = [metadata.schema.column(number) for number in range(len(metadata.schema))]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            # repeated values stay one: a kilobyte of a file may stand for terabytes of them
            self._file = parquet.ParquetFile(path, metadata=metadata, read_dictionary=texts)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"{path}: not a parquet file, or cut off ({_first_line(error)})") from error
        names = self._file.schema_arrow.names
        self._columns = [name for name in names if columns is None or name in columns]
        if columns and not self._columns:
            found = ", ".join(names[:20])
            raise DataError(f"{path}: has none of the columns {', '.join(columns)} (found: {found})")
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._first = np.concatenate([[0], np.cumsum([group.num_rows for group in groups], dtype=np.int64)])
        self.num_blocks = len(groups)
        largest = max(map(self._checked_bytes, range(len(groups)), groups), default=1)
        fitting = max(1, WINDOW_BYTES // max(1, largest) - 1)
        self.window = min(_window(self.num_blocks, int(self._first[-1])), fitting)
        self._group = lru_cache(maxsize=self.window + 1)(self._read_group)

    def count(self, block: int) -> int:
        return int(self._first[block + 1] - self._first[block])

    def row(self, block: int, number: int) -> Row:
        return self._group(block).row(number)

    def where(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"

    def _checked_bytes(self, number: int, group: Any) -> int:
        """Return the decompressed bytes of a row group's columns that may be needed.

        Raises:
            DataError: they, or the values in them, are more than memory should hold; or values share their
                beginnings, so that a few bytes may stand for any number of long ones.
        """
        columns = [group.column(place) for place in range(group.num_columns)]
        needed = [column for column in columns if column.path_in_schema.partition(".")[0] in self._columns]
        size = sum(column.total_uncompressed_size for column in needed)
        values = max((column.num_values for column in needed), default=0)
        smaller = "write it with smaller ones, such as row_group_size=1000"
        if not 0 <= group.num_rows <= _MOST_GROUP_ROWS:
            raise DataError(f"{self.path}: row group {number} has {group.num_rows:,} rows; {smaller}")
        if size > WINDOW_BYTES // 2 or values > _MOST_GROUP_VALUES:
            raise DataError(
                f"{self.path}: row group {number} has {size / 1024**2:,.0f} MiB and {values:,} values; "
                f"{smaller}"
            )
        if any("DELTA_BYTE_ARRAY" in column.encodings for column in needed):
            raise DataError(f"{self.path}: has the encoding DELTA_BYTE_ARRAY; write it with another one")
        return size

    def _read_group(self, block: int) -> _Block:
        import pyarrow

        try:
            rows = self._file.read_row_group(block, columns=self._columns, use_threads=False)
            return _Block(rows, largest_row(rows) <= LONGEST_LINE)
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
        except (pyarrow.ArrowException, OSError, EOFError, IndexError, ValueError, MemoryError) as error:
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
        return self._batch(block).row(number)

    def where(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"

    def _validated(self, block: int) -> _Block:
        """Return the batch after checking that none of its offsets point outside; the library trusts what it
        maps."""
        import pyarrow

        batch = self._batches[block]
        try:
            kept = batch.select([name for name in batch.schema.names if name in self._columns])
            kept.validate(full=True)
        except (pyarrow.ArrowException, ValueError) as error:
            raise DataError(f"record batch {block} is damaged ({_first_line(error)})") from error
        return _Block(kept, largest_row(kept) <= LONGEST_LINE)


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


@dataclass(frozen=True)
class _Block:
    """The rows of a row group or of a record batch."""

    rows: Any
    is_small: bool
    """True if every row fits a line of JSONL; False if each must be measured."""

    def row(self, number: int) -> Row:
        row = self.rows.slice(number, 1)
        if not row.num_rows:
            raise DataError("the file is damaged: it counts more rows than it has")
        if not self.is_small and largest_row(row) > LONGEST_LINE:
            raise DataError(f"the row is larger than {LONGEST_LINE // 1024**2} MiB")
        try:
            return row.to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8: {error.object[:40]!r}") from error


def _record_batches(path: Path) -> list[Any]:
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    is_file = mapped.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    mapped.seek(_ARROW_PADDING if is_file else 0)
    for message in pyarrow.ipc.MessageReader.open_stream(mapped):
        if is_compressed(message.metadata.to_pybytes()):
            raise ValueError("its buffers are compressed, and `datasets` writes plain ones")
    mapped.seek(0)
    if not is_file:
        return list(pyarrow.ipc.open_stream(mapped))
    reader = pyarrow.ipc.open_file(mapped)
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _window(num_blocks: int, rows: int) -> int:
    return min(max(1, round(WINDOW_ROWS * num_blocks / max(1, rows))), max(1, num_blocks))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
