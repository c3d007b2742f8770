"""Entries of the journal and their encoding: msgpack, with arrays as raw bytes."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import ExpertIds, Sample
from megatron_ibpo.basics.sampling_mask import decoded_mask, encoded_mask

FORMAT = 1
GroupId = tuple[int, int]
"""(prompt index, attempt)."""


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
    """`Prompt.index`."""
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
    """Number of responses."""
    corrections: int
    """Number of corrections."""
    skipped_pairs: int
    """`Group.skipped_pairs`."""

    @property
    def id(self) -> GroupId:
        return self.prompt_index, self.attempt

    def sample_keys(self) -> list[SampleKey]:
        """Return the keys of all its samples."""
        group_id = self.prompt_index, self.attempt
        return [SampleKey(*group_id, "response", index) for index in range(self.responses)] + [
            SampleKey(*group_id, "correction", index) for index in range(self.corrections)
        ]


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
    """First segment needed to resume from that checkpoint, or from one of a later step."""
    rewound: int | None = None
    """If set, batches of later steps than this, and samples of groups open at that time, no longer count."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One scored sample."""

    key: SampleKey
    sample: Sample


Entry = SegmentStart | Sampled | ClosedBatch

_TOKENS, _FLOATS, _FLAGS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("?")
_EXPERTS: tuple[np.dtype[Any], ...] = (np.dtype("u1"), np.dtype("<u2"))
"""Types of expert ids, by bytes per id less one."""


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry.

    Raises:
        TypeError: an array of a sample has another dtype than `Sample` allows, and would be restored
            differently.
    """
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
    """Return the entry that `encode` gave these bytes for; the arrays are new and writable.

    Raises:
        MalformedEntryError: the bytes are not an entry.
        JournalError: another version of this program wrote them.
    """
    try:
        kind, *fields = msgpack.unpackb(payload, unicode_errors="surrogatepass")
        match kind:
            case "begin":
                return _begin(*fields)
            case "sample":
                return Sampled(SampleKey(*fields[:4]), _sample(*fields[4:]))
            case "closed":
                return _closed(*fields)
    except JournalError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedEntryError(f"not a journal entry: {error}") from error
    raise MalformedEntryError(f"not a journal entry: it is called {kind!r}")


def _begin(version: int, *fields: Any) -> SegmentStart:
    if version != FORMAT:
        raise JournalError(f"it has format {version}, and this version reads format {FORMAT}")
    return SegmentStart(*fields)


def _closed(step: int, groups: list[list[Any]], dropped: list[list[Any]]) -> ClosedBatch:
    return ClosedBatch(
        step, tuple(ClosedGroup(*group) for group in groups), tuple(DroppedGroup(*group) for group in dropped)
    )


def _sample_fields(sample: Sample) -> list[Any]:
    fields = [
        _bytes(sample.prompt_token_ids, _TOKENS),
        _bytes(sample.token_ids, _TOKENS),
        _bytes(sample.logprobs, _FLOATS),
        _bytes(sample.loss_mask, _FLAGS),
        sample.finish_reason,
        float(sample.temperature),
        [(int(first), int(version)) for first, version in sample.versions],
        sample.index,
        None if sample.reward is None else float(sample.reward),
        bool(sample.correct),
        sample.reward_error,
    ]
    optional_fields = [
        sample.reward_details or None,
        None if sample.routed_experts is None else _choices_fields(sample.routed_experts),
        None if sample.sampling_mask is None else encoded_mask(sample.sampling_mask, sample.token_ids),
        sample.drafts if any(sample.drafts) else None,
    ]
    # left out at the end, as in older versions without them
    while optional_fields and optional_fields[-1] is None:
        optional_fields.pop()
    return fields + optional_fields


def _choices_fields(ids: ExpertIds) -> list[Any]:
    if ids.dtype not in _EXPERTS or ids.ndim != 3:
        raise TypeError(f"a sample's routed_experts is {ids.dtype} of shape {ids.shape}")
    return [ids.dtype.itemsize, list(ids.shape), ids.tobytes()]


def _choices(itemsize: int, shape: list[int], ids: bytes) -> ExpertIds:
    return np.frombuffer(ids, _EXPERTS[itemsize - 1]).reshape(shape).copy()


def _sample(
    prompt_token_ids: bytes,
    token_ids: bytes,
    logprobs: bytes,
    loss_mask: bytes,
    finish_reason: Literal["stop", "length"],
    temperature: float,
    versions: list[list[int]],
    index: int,
    reward: float | None,
    correct: bool,
    reward_error: str | None,
    reward_details: dict[str, float] | None = None,
    routed_experts: list[Any] | None = None,
    sampling_mask: bytes | None = None,
    drafts: tuple[int, int] | None = None,
) -> Sample:
    tokens = np.frombuffer(token_ids, _TOKENS).copy()
    return Sample(
        prompt_token_ids=np.frombuffer(prompt_token_ids, _TOKENS).copy(),
        token_ids=tokens,
        logprobs=np.frombuffer(logprobs, _FLOATS).copy(),
        finish_reason=finish_reason,
        temperature=temperature,
        versions=tuple((first, version) for first, version in versions),
        loss_mask=np.frombuffer(loss_mask, _FLAGS).copy(),
        index=index,
        reward=reward,
        correct=correct,
        reward_error=reward_error,
        reward_details=reward_details or {},
        routed_experts=None if routed_experts is None else _choices(*routed_experts),
        sampling_mask=None if sampling_mask is None else decoded_mask(sampling_mask, tokens),
        drafts=(0, 0) if drafts is None else (int(drafts[0]), int(drafts[1])),
    )


def _bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if array.dtype != dtype or array.ndim != 1:
        raise TypeError(f"a sample's array is {array.dtype} of shape {array.shape}, not {dtype} of one axis")
    return array.tobytes()
