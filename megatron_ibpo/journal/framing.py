"""Records in a file, one behind the other: each has a header with its length and checksums of both."""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from megatron_ibpo.user_files import check_user_file

_MAGIC = b"IBPJ"
_HEADER = struct.Struct("<4sIII")
"""Magic, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here: a damaged length is
told from a record whose end was never written."""
_MOST_BYTES = 2**30
"""Of a payload; Linux takes 2 GiB in one write."""


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
    with path.open("rb") as file:
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


def _next_header(file: IO[bytes], start: int, size: int) -> int:
    """Offset of the first header from `start` on; `size` where there is none."""
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        at = data.find(_MAGIC, start)
        while at >= 0:
            if _length(data[at : at + _HEADER.size]) is not None:
                return at
            at = data.find(_MAGIC, at + 1)
    return size
