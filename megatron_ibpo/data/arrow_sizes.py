"""The sizes of rows of Arrow tables in Python, and the Arrow files that would be unpacked when they are read.

A few bytes of a file may stand for gigabytes: a value that is repeated, a list of a billion nulls, compressed
buffers. So sizes are found before any row is made.
"""

from typing import Any

import numpy as np

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
    offsets: Any = np.frombuffer(array.buffers()[1], offset_type)
    return int(np.diff(offsets[array.offset : array.offset + len(array) + 1]).max())


def _longest_view(array: Any) -> int:
    views: Any = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # each begins with its length
    return int(views[array.offset : array.offset + len(array), 0].max())


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
