"""Tables of Arrow: parquet files and the files of Hugging Face data sets, a block at a time. A few bytes of a
file may stand for gigabytes (a repeated value, a list of a billion nulls, compressed buffers), so sizes are
known before any row is made."""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ibpo.data.tables import LONGEST_LINE, Row, first_line
from megatron_ibpo.data.tokenizer import DataError

WINDOW_ROWS = 16_384
"""Approximate rows shuffled together: many batches' worth, and little memory."""
WINDOW_BYTES = 4 * 1024**3
"""Most memory of the row groups of one parquet file that are held at one time."""
_MOST_GROUP_ROWS, _MOST_GROUP_VALUES = 2**22, 2**26
"""Most rows of a row group, and most values of one of its columns."""
_UNREAD_ENCODINGS = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
"""Encodings of text in which the library cannot read repeated values as one."""
FOOTERS_TIMEOUT_S = 60
"""Seconds to read footers, beside one for each file."""
_ARROW_MAGIC, _ARROW_PADDING = b"ARROW1", 8
"""Beginning of an Arrow file that is no stream, and where its messages start."""


class _Blocks(ABC):
    """A file in blocks: the parts of it that are read at one time."""

    kind: str
    """Name of a block, for messages."""

    def __init__(self, path: Path, block_rows: Sequence[int], most_blocks: int | None = None):
        """
        Args:
            block_rows: rows of each block.
            most_blocks: blocks that may be held at one time; None: any number.
        """
        self.path = path
        self._first = np.concatenate([[0], np.cumsum(block_rows, dtype=np.int64)])
        self.num_blocks = len(block_rows)
        windows = round(WINDOW_ROWS * self.num_blocks / max(1, int(self._first[-1])))
        self.window = min(max(1, windows), max(1, self.num_blocks), most_blocks or self.num_blocks or 1)
        self._block = lru_cache(maxsize=self.window + 1)(self._measured_block)

    @abstractmethod
    def _read_block(self, block: int) -> Any:
        """Return the rows of a block, a table or a record batch, with the columns that may be needed."""

    def _measured_block(self, block: int) -> tuple[Any, bool]:
        """Return (the rows of a block, True if each of them fits a line of JSONL)."""
        import pyarrow

        try:
            rows = self._read_block(block)
            return rows, largest_row(rows) <= LONGEST_LINE
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"{self.kind} {block} cannot be read ({first_line(error)})") from error

    def count(self, block: int) -> int:
        return int(self._first[block + 1] - self._first[block])

    def row(self, block: int, number: int) -> Row:
        import pyarrow

        rows, are_small = self._block(block)
        row = rows.slice(number, 1)
        if not row.num_rows:
            raise DataError("the file is damaged: it counts more rows than it has")
        if not are_small and largest_row(row) > LONGEST_LINE:
            raise DataError(f"the row is larger than {LONGEST_LINE // 1024**2} MiB, or has unions or runs")
        try:
            return row.to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8: {error.object[:40]!r}") from error
        except pyarrow.ArrowException as error:  # an index beyond the repeated values that it names
            raise DataError(f"the file is damaged ({first_line(error)})") from error

    def location(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"


_READ_FOOTERS = """
import json, sys
from pyarrow import parquet
for path in json.load(sys.stdin):
    print(json.dumps(path), flush=True)
    try:
        metadata = parquet.read_metadata(path)
    except Exception:
        continue  # the reader says why
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            group.column(place)
"""


_SOUND: set[tuple[str, int, int]] = set()
"""Path, size and time of the files whose footers have been read."""


def check_footers(files: Sequence[Path]) -> None:
    """Raise DataError if the footer of a parquet file among these would end the process: pyarrow lets some
    errors of its C++ pass all handlers of Python. So a process of its own reads all of them first, once."""
    stats = ((str(file), file.stat()) for file in files if file.suffix == ".parquet")
    versions = {(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats} - _SOUND
    paths = sorted(path for path, *_ in versions)
    if not paths:
        return
    timeout = FOOTERS_TIMEOUT_S + len(paths)
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _READ_FOOTERS], input=json.dumps(paths), capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DataError(f"{paths[0]}: reading the footers took more than {timeout} s") from None
    if child.returncode:
        path = json.loads(child.stdout.splitlines()[-1]) if child.stdout else paths[0]
        lines = child.stderr.split("what():")[-1].strip().splitlines()
        reason = lines[0] if lines else f"its reader ended with {child.returncode}"
        raise DataError(f"{path}: not a parquet file, or damaged ({reason[:200]})")
    _SOUND.update(versions)


class Parquet(_Blocks):
    """A parquet file in row groups."""

    kind = "row group"

    def __init__(self, path: Path, columns: Sequence[str] | None = None):
        """
        Args:
            columns: columns that may be needed; others are never decoded. None: all.
        """
        import pyarrow
        from pyarrow import parquet

        self.path = path
        check_footers([path])
        try:
            metadata = parquet.read_metadata(path)
            leaves = [metadata.schema.column(number) for number in range(len(metadata.schema))]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            # repeated values stay one: a kilobyte of a file may stand for terabytes of them
            self._file = parquet.ParquetFile(path, metadata=metadata, read_dictionary=texts)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DataError(f"{path}: not a parquet file, or cut off ({first_line(error)})") from error
        names = self._file.schema_arrow.names
        self._columns = [name for name in names if columns is None or name in columns]
        if columns and not self._columns:
            present = ", ".join(names[:20])
            raise DataError(f"{path}: has none of the columns {', '.join(columns)} (found: {present})")
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        largest = max(map(self._checked_bytes, range(len(groups)), groups), default=1)
        fitting = max(1, WINDOW_BYTES // max(1, largest) - 1)
        super().__init__(path, [group.num_rows for group in groups], fitting)

    def _checked_bytes(self, number: int, group: Any) -> int:
        """Return the decompressed bytes of a row group's columns that may be needed."""
        try:
            columns = [group.column(place) for place in range(group.num_columns)]
            needed = [
                column for column in columns if column.path_in_schema.partition(".")[0] in self._columns
            ]
        except ValueError as error:  # a name that is not UTF-8
            raise DataError(f"{self.path}: not a parquet file, or cut off ({first_line(error)})") from error
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
        encodings = {encoding for column in needed for encoding in column.encodings}
        if unread := sorted(encodings & _UNREAD_ENCODINGS):
            raise DataError(
                f"{self.path}: has the encoding {unread[0]}; write it with another one, such as by "
                "pandas.read_parquet(FILE).to_parquet(FILE)"
            )
        return size

    def _read_block(self, block: int) -> Any:
        return self._file.read_row_group(block, columns=self._columns, use_threads=False)


class ArrowFile(_Blocks):
    """An Arrow file of a Hugging Face data set on disk, in record batches, with the columns that may be
    needed. It is mapped, not read."""

    kind = "record batch"

    def __init__(self, path: Path, columns: Sequence[str]):
        import pyarrow

        try:
            self._batches = _record_batches(path)
        except (pyarrow.ArrowException, OSError, EOFError, IndexError, ValueError, MemoryError) as error:
            raise DataError(f"{path}: not an Arrow file, or cut off ({first_line(error)})") from error
        self._columns = columns
        super().__init__(path, [len(batch) for batch in self._batches])

    def _read_block(self, block: int) -> Any:
        batch = self._batches[block]
        selected = batch.select([name for name in batch.schema.names if name in self._columns])
        selected.validate(full=True)  # the library trusts the offsets of what it maps
        return selected


def _record_batches(path: Path) -> list[Any]:
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    is_file = mapped.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    mapped.seek(_ARROW_PADDING if is_file else 0)
    for message in pyarrow.ipc.MessageReader.open_stream(mapped):
        if is_compressed(message.metadata.to_pybytes()):
            raise ValueError(
                "its buffers are compressed; write plain ones, as `save_to_disk` does, or parquet"
            )
    mapped.seek(0)
    if not is_file:
        return list(pyarrow.ipc.open_stream(mapped))
    reader = pyarrow.ipc.open_file(mapped)
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


UNBOUNDED = 2**62
_POINTER = 8
_ROWS, _DICTIONARY = 3, 2
"""Kinds of messages that hold buffers."""


def largest_row(rows: Any) -> int:
    """Return a bound on the bytes that any row of a table or a batch takes in Python."""
    import pyarrow

    batches = rows.to_batches() if isinstance(rows, pyarrow.Table) else [rows]
    return max((sum(_most_bytes(column, 1) for column in batch.columns) for batch in batches), default=0)


def _most_bytes(array: Any, times: int) -> int:
    """Return a bound on the bytes of so many values of an array."""
    from pyarrow import BaseExtensionType, types

    kind, size = array.type, _POINTER * times
    if not len(array) or types.is_null(kind):
        return size
    if isinstance(kind, BaseExtensionType):
        return size + _most_bytes(array.storage, times)
    if types.is_dictionary(kind):
        nested = types.is_nested(array.dictionary.type)  # no writer of data sets makes any
        return UNBOUNDED if nested else size + _most_bytes(array.dictionary, times)
    if types.is_struct(kind):
        return size + sum(_most_bytes(field, times) for field in array.flatten())
    if types.is_fixed_size_list(kind):
        return size + _most_bytes(array.flatten(), times * kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        longest = int(np.diff(array.offsets.to_numpy()).max())
        entries = [array.keys, array.items] if types.is_map(kind) else [array.flatten()]
        return size + sum(_most_bytes(entry, times * longest) for entry in entries)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return size + _most_bytes(array.values, times * int(array.sizes.to_numpy().max()))
    if types.is_primitive(kind) or types.is_decimal(kind):
        return 2 * size
    if types.is_fixed_size_binary(kind):
        return size + times * kind.byte_width
    if types.is_string(kind) or types.is_binary(kind):
        return size + times * _longest(array, np.int32)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return size + times * _longest(array, np.int64)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return size + times * _longest_view(array)
    return UNBOUNDED  # unions and runs, of which no writer of data sets makes any


def _longest(array: Any, offset_type: type) -> int:
    # a damaged buffer may have bytes beyond its last element
    offsets: Any = np.frombuffer(array.buffers()[1], offset_type, array.offset + len(array) + 1)
    return int(np.diff(offsets[array.offset :]).max())


def _longest_view(array: Any) -> int:
    end = array.offset + len(array)
    # each view begins with its length
    views: Any = np.frombuffer(array.buffers()[1], np.int32, 4 * end).reshape(-1, 4)
    return int(views[array.offset :, 0].max())


def is_compressed(metadata: bytes) -> bool:
    """Return whether the metadata of an Arrow message, a flatbuffer, says that its buffers are compressed:
    they are unpacked, to any size, as soon as the message is read."""

    def number(place: int, size: int) -> int:
        return int.from_bytes(metadata[place : place + size], "little", signed=size == 4)

    def field(table: int, index: int) -> int:
        """Return the place of a field; 0 if the table lacks it."""
        vtable = table - number(table, 4)
        entry = 4 + 2 * index
        offset = number(vtable + entry, 2) if entry < number(vtable, 2) else 0
        return table + offset if offset else 0

    def inner_table(table: int, index: int) -> int:
        place = field(table, index)
        return place + number(place, 4) if place else 0

    message = number(0, 4)
    kind, content = field(message, 1), inner_table(message, 2)
    if kind and metadata[kind] == _DICTIONARY:
        content = inner_table(content, 1)
    elif not kind or metadata[kind] != _ROWS:
        return False
    return bool(content and field(content, 3))
