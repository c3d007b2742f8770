"""Records in a file, one behind the other: each has a header with its length and checksums of both."""

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatron_ibpo.user_files import check_user_file

_MAGIC = b"IBPJ"
_HEADER = struct.Struct("<4sIII")
"""Magic, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here: a damaged length is
told from a record whose end was never written."""
_MOST_BYTES = 2**30
"""Of a payload; Linux takes 2 GiB in one write."""


class BadRecordError(Exception):
    """At this byte a file holds no record. `is_torn`: only because it ends too early."""

    def __init__(self, offset: int, what: str, *, end: int | None = None, is_torn: bool = False) -> None:
        super().__init__(what)
        self.offset = offset
        self.end = end
        """Where the next record begins; None where the header does not say."""
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


def payloads(
    path: Path, damaged: Callable[[BadRecordError], None] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, payload) of every record of the file. A length beyond its end is not believed, nor read.

    Args:
        damaged: is told of each place without a record; reading goes on with the next record behind it.

    Raises:
        BadRecordError: at the first such place, without `damaged`.
    """
    check_user_file(path)
    with path.open("rb") as file:
        size, offset = path.stat().st_size, 0
        while offset < size:
            try:
                payload = _payload(file, offset, size)
            except BadRecordError as error:
                if damaged is None:
                    raise
                damaged(error)
                offset = _next_record(file, offset, size) if error.end is None else error.end
                continue
            yield offset, payload
            offset += _HEADER.size + len(payload)


def _payload(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    header = file.read(_HEADER.size)
    length = _length(header, offset)
    end = offset + _HEADER.size + length
    if end > size:
        raise BadRecordError(offset, "a record was never finished", end=size, is_torn=True)
    payload = file.read(length)
    if zlib.crc32(payload) != _HEADER.unpack(header)[2]:
        raise BadRecordError(offset, "a record does not have its checksum", end=end)
    return payload


def _next_record(file: BinaryIO, offset: int, size: int) -> int:
    """Return where the next header stands behind a damaged one; the end of the file where there is none."""
    file.seek(0)
    content = file.read()  # a segment: tens of megabytes
    while (offset := content.find(_MAGIC, offset + 1)) >= 0:
        with suppress(BadRecordError):
            _length(content[offset : offset + _HEADER.size], offset)
            return offset
    return size


def _length(header: bytes, offset: int) -> int:
    if len(header) < _HEADER.size:
        raise BadRecordError(offset, "a record was never finished", is_torn=True)
    magic, length, _, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or checksum != zlib.crc32(header[:-4]) or length > _MOST_BYTES:
        raise BadRecordError(offset, "what stands here is no header of a record")
    return length
