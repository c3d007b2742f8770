"""Records in a file, one behind the other: each has a header with its length and checksums of both."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_ibpo.user_files import check_user_file

_MAGIC = b"IBPJ"
_HEADER = struct.Struct("<4sIII")
"""Magic, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here: a damaged length is
told from a record whose end was never written."""
_MOST_BYTES = 2**30
"""Of a payload; Linux takes 2 GiB in one write."""


class BadRecordError(Exception):
    """From this byte on a file holds no record. `is_torn`: only because it ends too early."""

    def __init__(self, offset: int, what: str, *, is_torn: bool = False) -> None:
        super().__init__(what)
        self.offset = offset
        self.is_torn = is_torn


def framed(payload: bytes) -> bytes:
    """The record of this payload.

    Raises:
        ValueError: it is longer than 1 GiB.
    """
    if len(payload) > _MOST_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes is longer than a journal takes ({_MOST_BYTES})")
    head = struct.pack("<4sII", _MAGIC, len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def payloads(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of every record of the file. A length beyond its end is not believed, nor read.

    Raises:
        BadRecordError: after the last record that is whole, where anything follows it.
    """
    check_user_file(path)
    with path.open("rb") as file:
        size, offset = path.stat().st_size, 0
        while header := file.read(_HEADER.size):
            length = _length(header, offset)
            if length > size - offset - _HEADER.size:
                raise BadRecordError(offset, "a record was never finished", is_torn=True)
            payload = file.read(length)
            if zlib.crc32(payload) != _HEADER.unpack(header)[2]:
                raise BadRecordError(offset, "a record does not have its checksum")
            yield offset, payload
            offset += len(header) + length


def _length(header: bytes, offset: int) -> int:
    if len(header) < _HEADER.size:
        raise BadRecordError(offset, "a record was never finished", is_torn=True)
    magic, length, _, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or checksum != zlib.crc32(header[:-4]) or length > _MOST_BYTES:
        raise BadRecordError(offset, "what stands here is no header of a record")
    return length
