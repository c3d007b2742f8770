"""The journal on disk: entries, encoded by msgpack with arrays as raw bytes, and consecutive records of them
in a file, each with a header of its length and checksums of both."""

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import ExpertIds, Sample
from megatron_ibpo.basics.sampling_mask import decoded_mask, encoded_mask
from megatron_ibpo.basics.user_files import check_user_file

FORMAT = 2
GroupId = tuple[int, int]
"""(prompt index, attempt)."""

_MAGIC = b"IBPJ"
_HEADER = struct.Struct("<4sIII")
"""Magic, bytes of the payload, CRC-32 of the payload, CRC-32 of the header up to here. The last one
distinguishes a damaged length from a record whose end was never written."""
_MOST_BYTES = 2**30
"""Largest payload in bytes; Linux takes 2 GiB in one write."""
_CHUNK = 2**20
"""Bytes to search for a header at a time; mapping the file would hold all of it in memory."""


class JournalError(ValueError):
    """A journal that cannot be used; the message says where it is and what to do."""


class LostStepError(RuntimeError):
    """A completed step that is no longer in the journal; a new start of the run samples it again."""


class MalformedEntryError(ValueError):
    """Undamaged bytes that are not an entry."""


@dataclass(frozen=True, slots=True)
class SampleKey:
    """The unique key of a sample in a run."""

    prompt_index: int
    attempt: int
    """Number of times that the prompt had been asked before: 0, 1, …."""
    kind: Literal["response", "correction"]
    index: int
    """Index among the responses, or the corrections, of its group (`Sample.index`)."""

    @property
    def group(self) -> GroupId:
        return self.prompt_index, self.attempt


class ClosedGroup(NamedTuple):
    """A group that a batch trains on. Its samples have the indices 0, 1, … of either kind."""

    prompt_index: int
    attempt: int
    responses: int
    corrections: int
    skipped_pairs: int

    @property
    def id(self) -> GroupId:
        return self.prompt_index, self.attempt

    def sample_keys(self) -> list[SampleKey]:
        """Return the keys of all its samples."""
        responses = [SampleKey(*self.id, "response", index) for index in range(self.responses)]
        return responses + [SampleKey(*self.id, "correction", index) for index in range(self.corrections)]


class DroppedGroup(NamedTuple):
    """A group that was sampled, perhaps in part, and that no batch will ever train on."""

    prompt_index: int
    attempt: int
    reason: str

    @property
    def id(self) -> GroupId:
        return self.prompt_index, self.attempt


@dataclass(frozen=True, slots=True)
class ClosedBatch:
    """The batch that a step trains on, and the groups dropped since the previous batch was closed."""

    step: int
    """Completed steps of the run after training on this batch: the first batch has 1."""
    groups: tuple[ClosedGroup, ...]
    """Groups in the order in which they are credited."""
    dropped: tuple[DroppedGroup, ...] = ()

    @property
    def settled(self) -> list[GroupId]:
        """Groups that this batch closed or dropped."""
        return [group.id for group in self.groups] + [group.id for group in self.dropped]


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """The first entry of every segment."""

    settings: str
    """Sampling settings of the run that writes the segment."""
    saved: int
    """Step of the checkpoint that was complete on disk at this time."""
    last_step: int
    """Number of the last batch closed by then; its own segment may be deleted before this one."""
    needed_from: int
    """First segment needed to resume from the checkpoint of step `saved` or of a later step."""
    rewound: int | None = None
    """If set, batches of later steps than this, and samples of groups open at that time, no longer count."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One scored sample."""

    key: SampleKey
    sample: Sample


Entry = SegmentStart | Sampled | ClosedBatch

_ARRAYS = {"prompt_token_ids": "<i4", "token_ids": "<i4", "logprobs": "<f4", "loss_mask": "?"}
"""Arrays of a sample, with their dtypes."""
_PLAIN = ("finish_reason", "temperature", "index", "reward", "correct", "reward_error", "reward_details")
"""Fields of a sample that are stored as they are."""
_EXPERTS: tuple[np.dtype[Any], ...] = (np.dtype("u1"), np.dtype("<u2"))
"""Types of expert ids, by bytes per id less one."""


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry. Raises TypeError if an array of a sample has another dtype than `Sample`
    allows, since it would be restored differently."""
    fields: list[Any]
    match entry:
        case SegmentStart():
            steps = [entry.saved, entry.last_step, entry.needed_from, entry.rewound]
            fields = ["begin", FORMAT, entry.settings, *steps]
        case Sampled():
            key = entry.key
            fields = ["sample", key.prompt_index, key.attempt, key.kind, key.index]
            fields += _sample_fields(entry.sample)
        case ClosedBatch():
            fields = ["closed", entry.step, entry.groups, entry.dropped]
    # a verifier's error text may hold halves of surrogate pairs, which strict UTF-8 refuses
    return msgpack.packb(fields, unicode_errors="surrogatepass")


def decode(payload: bytes) -> Entry:
    """Return the entry that `encode` gave these bytes for; the arrays are new and writable. Raises
    MalformedEntryError if they are not an entry, and JournalError if another version of this program wrote
    them."""
    try:
        kind, *fields = msgpack.unpackb(payload, unicode_errors="surrogatepass")
        match kind:
            case "begin":
                version, *start = fields
                if version != FORMAT:
                    raise JournalError(f"it has format {version}, and this version reads format {FORMAT}")
                return SegmentStart(*start)
            case "sample":
                return Sampled(SampleKey(*fields[:4]), _sample(*fields[4:]))
            case "closed":
                step, groups, dropped = fields
                return ClosedBatch(
                    step,
                    tuple(ClosedGroup(*group) for group in groups),
                    tuple(DroppedGroup(*group) for group in dropped),
                )
    except JournalError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedEntryError(f"not a journal entry: {error}") from error
    raise MalformedEntryError(f"not a journal entry: it is called {kind!r}")


def _sample_fields(sample: Sample) -> list[Any]:
    return [
        [_bytes(getattr(sample, name), np.dtype(dtype)) for name, dtype in _ARRAYS.items()],
        [getattr(sample, name) for name in _PLAIN],
        [(int(first), int(version)) for first, version in sample.versions],
        None if sample.routed_experts is None else _choices_fields(sample.routed_experts),
        None if sample.sampling_mask is None else encoded_mask(sample.sampling_mask, sample.token_ids),
        sample.drafts,
    ]


def _choices_fields(ids: ExpertIds) -> list[Any]:
    if ids.dtype not in _EXPERTS or ids.ndim != 3:
        raise TypeError(f"a sample's routed_experts is {ids.dtype} of shape {ids.shape}")
    return [ids.dtype.itemsize, list(ids.shape), ids.tobytes()]


def _choices(itemsize: int, shape: list[int], ids: bytes) -> ExpertIds:
    return np.frombuffer(ids, _EXPERTS[itemsize - 1]).reshape(shape).copy()


def _sample(
    arrays: list[bytes],
    plain: list[Any],
    versions: list[list[int]],
    routed_experts: list[Any] | None,
    sampling_mask: bytes | None,
    drafts: list[int],
) -> Sample:
    values: dict[str, Any] = dict(zip(_PLAIN, plain, strict=True))
    for (name, dtype), content in zip(_ARRAYS.items(), arrays, strict=True):
        values[name] = np.frombuffer(content, dtype).copy()
    drafted, accepted = drafts
    return Sample(
        **values,
        versions=tuple((first, version) for first, version in versions),
        routed_experts=None if routed_experts is None else _choices(*routed_experts),
        sampling_mask=None if sampling_mask is None else decoded_mask(sampling_mask, values["token_ids"]),
        drafts=(drafted, accepted),
    )


def _bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if array.dtype != dtype or array.ndim != 1:
        raise TypeError(f"a sample's array is {array.dtype} of shape {array.shape}, not {dtype} of one axis")
    return array.tobytes()


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
