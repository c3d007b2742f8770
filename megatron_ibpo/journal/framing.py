"""Records in a file, one behind the other: each has a header with its length and checksums of both."""

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
"""Magic, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here: a damaged length is
told from a record whose end was never written."""
_MOST_BYTES = 2**30
"""Bytes of the largest payload; Linux takes 2 GiB in one write."""
_CHUNK = 2**20
"""Bytes that are looked through at once for a header; mapping the file would hold all of it in memory."""


class Record(NamedTuple):
    """A record that is whole."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes from this offset on that hold no record, up to the next one that can be found."""

    offset: int
    what: str
    is_torn: bool = False
    """The file only ends too early: its writer was stopped in the middle of a record."""


def framed(payload: bytes) -> bytes:
    """The record of this payload.

    Raises:
        ValueError: it is longer than 1 GiB.
    """
    if len(payload) > _MOST_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes is longer than a journal takes ({_MOST_BYTES})")
    head = struct.pack("<4sII", _MAGIC, len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def records(path: Path) -> Iterator[Record | Damage]:
    """All records of the file, and what is damaged between them. A length beyond its end is not read.

    Where a payload is damaged, its header says where the next record begins. Where a header is, the next one
    that has its checksum is looked for.
    """
    check_user_file(path)
    with path.open("rb", buffering=0) as file:  # a buffer would not know of the seeks of `_skip_hole`
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
                    yield Damage(offset, "a record does not have its checksum")
                offset += len(header) + length
                continue
            found = _next_header(file, offset + 1, size)
            if found == size and (length is not None or len(header) < _HEADER.size):
                yield Damage(offset, "a record was never finished", is_torn=True)
            else:
                yield Damage(offset, "what stands here is no header of a record")
            offset = found


def _length(header: bytes) -> int | None:
    """Bytes of the payload behind this header; None if it is none."""
    if len(header) < _HEADER.size:
        return None
    magic, length, _, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or checksum != zlib.crc32(header[:-4]) or length > _MOST_BYTES:
        return None
    return int(length)


def _next_header(file: FileIO, start: int, size: int) -> int:
    """Return the offset of the first header from `start` on; `size` where there is none."""
    offset, kept = start, b""  # of the last read, since a header may lie across two
    while (data_at := _skip_hole(file, offset + len(kept), size)) < size:
        if data_at > offset + len(kept):
            offset, kept = data_at, b""
        file.seek(data_at)
        data = kept + file.read(_CHUNK)
        at = data.find(_MAGIC)
        while at >= 0:
            if _length(data[at : at + _HEADER.size]) is not None:
                return offset + at
            at = data.find(_MAGIC, at + 1)
        kept = data[-(_HEADER.size - 1) :]
        offset += len(data) - len(kept)
    return size


def _skip_hole(file: FileIO, offset: int, size: int) -> int:
    """Return the offset of the first byte from `offset` on that was written: a file that was only made longer
    may have 10 GB of nothing."""
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:  # which says that nothing more was written
            raise
        return size
