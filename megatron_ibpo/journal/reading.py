"""What a journal says to a run that goes on from a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megatron_ibpo.journal.entries import (
    Begin,
    ClosedBatch,
    Entry,
    GroupId,
    JournalError,
    MalformedEntryError,
    Sampled,
    SampleKey,
    decode,
)
from megatron_ibpo.journal.framing import BadRecordError, payloads
from megatron_ibpo.records import Sample

_SUFFIX = ".journal"

T = TypeVar("T")


@dataclass
class Damage:
    """What of a journal cannot be read. A damaged record is left out, and what it held is sampled again; the
    records behind it count."""

    notes: list[str] = field(default_factory=list)
    """A line for each place."""
    torn: tuple[Path, int] | None = None
    """Segment and byte of an unfinished record at the very end, whose writer was stopped in its middle."""
    is_suspended: bool = False
    """The beginning of a segment is lost, which may have taken back what was written before. What follows
    counts only from the next beginning that takes something back."""

    def note(self, path: Path, offset: int, what: str) -> None:
        self.notes.append(f"{path}: {what} (at byte {offset})")


@dataclass(frozen=True)
class Recovered:
    """What a run that goes on from a checkpoint need not sample again."""

    settings: str | None
    """Of the last run that wrote; None where nothing was written."""
    batches: tuple[ClosedBatch, ...]
    """Those of the steps after the checkpoint's, without a gap."""
    samples: dict[SampleKey, Sample]
    """All samples of these batches, and of the groups that no batch took or dropped yet."""
    last_step: int
    """The step of the last of these batches; the checkpoint's where there is none."""
    is_whole: bool
    """These batches are all that the journal knows of. Where they are not, or where the run is not to follow
    them, samples of open groups are left out, and the writer must be told (`Journal.rewound(last_step)`)."""
    notes: tuple[str, ...]
    """What could not be read, for the user."""


def read_journal(directory: Path, after_step: int) -> Recovered:
    """What the journal holds for a run that goes on from the checkpoint of step `after_step` (0: from none).

    Nothing is changed on disk; a directory that does not exist is an empty journal.

    Raises:
        JournalError: another version of the program wrote it.
        OSError: it cannot be read.
    """
    state = _State(after_step)
    damage = Damage()
    for _, entry in believed(directory, after_step, damage):
        state.take(entry)
    notes = [f"{note}; it is not used" for note in damage.notes]
    batches: list[ClosedBatch] = []
    samples: dict[SampleKey, Sample] = {}
    step = after_step
    while (closed := state.closed.get(step + 1)) is not None and closed.is_complete:
        step += 1
        batches.append(closed.batch)
        samples |= closed.samples
    is_whole = not damage.is_suspended and (state.settings is None or state.last_step == step)
    if is_whole:
        samples |= {key: sample for group in state.open.values() for key, sample in group.items()}
    elif state.last_step != step:
        notes.append(
            f"{directory}: the journal ends at step {state.last_step} and has no whole batch of step "
            f"{step + 1}; prompts after step {step} are sampled again"
        )
    return Recovered(state.settings, tuple(batches), samples, step, is_whole, tuple(notes))


def believed(directory: Path, after_step: int, damage: Damage) -> Iterator[tuple[int, Entry]]:
    """Yield (number of its segment, entry), as written, of all that a run after `after_step` may need.

    Args:
        damage: is told what cannot be read.

    Raises:
        JournalError: another version of the program wrote it.
    """
    numbers = segment_numbers(directory)
    first = _first_needed(directory, numbers, after_step)
    expected = first
    for number in (number for number in numbers if number >= first):
        if number != expected:
            damage.note(segment_path(directory, expected), 0, "this segment is missing")
            damage.is_suspended = True
        for entry in _entries(directory, number, damage, is_last=number == numbers[-1]):
            if isinstance(entry, Begin) and entry.rewound is not None:
                damage.is_suspended = False
            if not damage.is_suspended:
                yield number, entry
        expected = number + 1


def segment_path(directory: Path, number: int) -> Path:
    """Where a segment lies."""
    return directory / f"{number:06d}{_SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """Of the segments that there are, oldest first."""
    stems = (path.stem for path in directory.glob(f"*{_SUFFIX}"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def settle(groups: dict[GroupId, dict[SampleKey, T]], batch: ClosedBatch) -> dict[SampleKey, T]:
    """Take the groups that a batch trains on or drops out of the open ones; what was kept of the former."""
    for dropped in batch.dropped:
        groups.pop(dropped.id, None)
    return {key: kept for group in batch.groups for key, kept in groups.pop(group.id, {}).items()}


def _first_needed(directory: Path, numbers: list[int], after_step: int) -> int:
    """The segment to start from: what is older is not read, and damage there does no harm."""
    for number in reversed(numbers):
        begin = next(_entries(directory, number, Damage(), is_last=True), None)
        if isinstance(begin, Begin) and begin.saved <= after_step:
            return max(begin.needed_from, numbers[0])
    return numbers[0] if numbers else 0


def _entries(directory: Path, number: int, damage: Damage, *, is_last: bool) -> Iterator[Entry]:
    path = segment_path(directory, number)

    def unread(error: BadRecordError) -> None:
        damage.note(path, error.offset, str(error))
        if error.is_torn and is_last:
            damage.torn = path, error.offset
        elif error.offset == 0:
            damage.is_suspended = True

    if path.stat().st_size == 0:
        unread(BadRecordError(0, "the segment is empty", is_torn=True))
    for offset, payload in payloads(path, unread):
        try:
            entry = decode(payload)
            if isinstance(entry, Begin) != (offset == 0):
                raise MalformedEntryError("an entry stands in the wrong place")
        except MalformedEntryError as error:
            unread(BadRecordError(offset, str(error)))
        except JournalError as error:
            raise JournalError(f"{path}: {error}; move {directory} away, or use that version") from None
        else:
            yield entry


@dataclass
class _Closed:
    batch: ClosedBatch
    samples: dict[SampleKey, Sample]

    @property
    def is_complete(self) -> bool:
        """No segment with samples of it has been deleted."""
        return all(key in self.samples for group in self.batch.groups for key in group.sample_keys())


@dataclass
class _State:
    """What the entries so far come to."""

    after_step: int
    settings: str | None = None
    last_step: int = 0
    """Of the last batch that the journal knows to be closed."""
    open: dict[GroupId, dict[SampleKey, Sample]] = field(default_factory=dict)
    closed: dict[int, _Closed] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        match entry:
            case Sampled(key, sample):
                self.open.setdefault(key.group, {})[key] = sample
            case ClosedBatch(step):
                samples = settle(self.open, entry)
                if step > self.after_step:
                    self.closed[step] = _Closed(entry, samples)
                self.last_step = step
            case Begin():
                self.settings = entry.settings
                self.last_step = max(self.last_step, entry.last_step)
                if entry.rewound is not None:
                    self._rewind(entry.rewound)

    def _rewind(self, step: int) -> None:
        self.open.clear()
        self.closed = {own: closed for own, closed in self.closed.items() if own <= step}
        self.last_step = step
