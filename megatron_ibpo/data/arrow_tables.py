"""Tables of Arrow: parquet files and the files of Hugging Face data sets, a block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ibpo.data.arrow_sizes import is_compressed, largest_row
from megatron_ibpo.data.tables import LONGEST_LINE, Row
from megatron_ibpo.data.tokenizer import DataError

WINDOW_ROWS = 16_384
"""Approximate rows shuffled together: many batches' worth, and little memory."""
WINDOW_BYTES = 4 * 1024**3
"""Most memory of the row groups of one parquet file that are held at one time."""
_MOST_GROUP_ROWS, _MOST_GROUP_VALUES = 2**22, 2**26
"""Most rows of a row group, and most values of one of its columns."""
_UNREAD_ENCODINGS = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
"""Encodings of text in which the library cannot read repeated values as one."""
_ARROW_MAGIC, _ARROW_PADDING = b"ARROW1", 8
"""Beginning of an Arrow file that is no stream, and where its messages start."""


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
            present = ", ".join(names[:20])
            raise DataError(f"{path}: has none of the columns {', '.join(columns)} (found: {present})")
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

    def location(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"

    def _checked_bytes(self, number: int, group: Any) -> int:
        """Return the decompressed bytes of a row group's columns that may be needed."""
        try:
            columns = [group.column(place) for place in range(group.num_columns)]
            needed = [
                column for column in columns if column.path_in_schema.partition(".")[0] in self._columns
            ]
        except ValueError as error:  # a name that is not UTF-8
            raise DataError(f"{self.path}: not a parquet file, or cut off ({_first_line(error)})") from error
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

    def location(self, block: int, number: int) -> str:
        return f"{self.path}, row {self._first[block] + number}"

    def _validated(self, block: int) -> _Block:
        """Return the batch after checking that none of its offsets point outside; the library trusts what it
        maps."""
        import pyarrow

        batch = self._batches[block]
        try:
            selected = batch.select([name for name in batch.schema.names if name in self._columns])
            selected.validate(full=True)
        except (pyarrow.ArrowException, ValueError) as error:
            raise DataError(f"record batch {block} is damaged ({_first_line(error)})") from error
        return _Block(selected, largest_row(selected) <= LONGEST_LINE)


@dataclass(frozen=True)
class _Block:
    """The rows of a row group or of a record batch."""

    rows: Any
    is_small: bool
    """True if every row fits a line of JSONL; False if each must be measured."""

    def row(self, number: int) -> Row:
        import pyarrow

        row = self.rows.slice(number, 1)
        if not row.num_rows:
            raise DataError("the file is damaged: it counts more rows than it has")
        if not self.is_small and largest_row(row) > LONGEST_LINE:
            raise DataError(f"the row is larger than {LONGEST_LINE // 1024**2} MiB, or has unions or runs")
        try:
            return row.to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8: {error.object[:40]!r}") from error
        except pyarrow.ArrowException as error:  # an index beyond the repeated values that it names
            raise DataError(f"the file is damaged ({_first_line(error)})") from error


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


def _window(num_blocks: int, rows: int) -> int:
    return min(max(1, round(WINDOW_ROWS * num_blocks / max(1, rows))), max(1, num_blocks))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
