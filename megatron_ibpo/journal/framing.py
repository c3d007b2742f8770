"""Consecutive records in a file, each with a header of its length and checksums of both."""

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from megatron_ibpo.basics.user_files import check_user_file

_MAGIC = b"IBPJ"
_HEADER = struct.Struct("<4sIII")
"""Magic, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here. The last one
distinguishes a damaged length from a record whose end was never written."""
_MOST_BYTES = 2**30
"""Largest payload in bytes; Linux takes 2 GiB in one write."""
_CHUNK = 2**20
"""Bytes to search for a header at a time; mapping the file would hold all of it in memory."""


class Record(NamedTuple):
    """A complete record."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes from this offset to the next record that can be found, which hold no record."""

    offset: int
    problem: str
    is_torn: bool = False
    """True if the file merely ends too early, because its writer was stopped in the middle of a record."""


def framed(payload: bytes) -> bytes:
    """Return the record of this payload. Raises ValueError if it is longer than 1 GiB."""
    if len(payload) > _MOST_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes exceeds the journal's limit of {_MOST_BYTES}")
    head = struct.pack("<4sII", _MAGIC, len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def records(path: Path) -> Iterator[Record | Damage]:
    """Yield all records of the file, and the damage between them. A length beyond the file's end is not read.

    If a payload is damaged, its header still gives the start of the next record. If a header is damaged, the
    next one with a valid checksum is searched for.
    """
    check_user_file(path)
    with path.open("rb", buffering=0) as file:  # a buffer would not follow the seeks of `_skip_hole`
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            file.seek(offset)
            header = file.read(_HEADER.size)
            length = _length(header)
            if length is not None and offset + len(header) + length <= size:
                payload = file.read(length)
                if zlib.crc32(payload) == _HEADER.unpack(header)[2]:
                    yield Record(offset, payload)
                else:
                    yield Damage(offset, "a record does not match its checksum")
                offset += len(header) + length
                continue
            next_offset = _next_header(file, offset + 1, size)
            if next_offset == size and (length is not None or len(header) < _HEADER.size):
                yield Damage(offset, "a record is unfinished", is_torn=True)
            else:
                yield Damage(offset, "no record begins here")
            offset = next_offset


def _length(header: bytes) -> int | None:
    """Return the bytes of the payload behind this header; None if it is not a header."""
    if len(header) < _HEADER.size:
        return None
    magic, length, _, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or checksum != zlib.crc32(header[:-4]) or length > _MOST_BYTES:
        return None
    return int(length)


def _next_header(file: FileIO, start: int, size: int) -> int:
    """Return the offset of the first header from `start` on, or `size` if there is none."""
    offset, tail = start, b""  # end of the last read, since a header may span two reads
    while (data_at := _skip_hole(file, offset + len(tail), size)) < size:
        if data_at > offset + len(tail):
            offset, tail = data_at, b""
        file.seek(data_at)
        data = tail + file.read(_CHUNK)
        at = data.find(_MAGIC)
        while at >= 0:
            if _length(data[at : at + _HEADER.size]) is not None:
                return offset + at
            at = data.find(_MAGIC, at + 1)
        tail = data[-(_HEADER.size - 1) :]
        offset += len(data) - len(tail)
    return size


def _skip_hole(file: FileIO, offset: int, size: int) -> int:
    """Return the offset of the first written byte from `offset` on: a file that was only extended may have a
    10 GB hole."""
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:  # nothing more was written
            raise
        return size
