"""Recovery: what a journal holds for a run that resumes from a checkpoint."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.journal.entries import (
    ClosedBatch,
    Damage,
    Entry,
    GroupId,
    JournalError,
    MalformedEntryError,
    Record,
    Sampled,
    SampleKey,
    SegmentStart,
    decode,
    records,
)

_SUFFIX = ".journal"
_MOST_PLACES = 5
"""Most places of damage to name in a note."""

T = TypeVar("T")


@dataclass(frozen=True)
class Recovered:
    """Samples and batches that a resumed run need not sample again."""

    settings: str | None
    """Sampling settings of the last run that wrote; None if nothing was written."""
    batches: tuple[ClosedBatch, ...]
    """Batches of the steps after the checkpoint's, without a gap."""
    samples: dict[SampleKey, Sample]
    """All samples of these batches, and those of other groups that the run continues with."""
    last_step: int
    """Step of the last of these batches, or of the checkpoint if there is none."""
    is_whole: bool
    """True if these batches are all that the journal knows of, and nothing is damaged. Otherwise, or if the
    run does not follow them, the writer must be told (`Journal.follow`)."""
    notes: tuple[str, ...]
    """Records that could not be read, for the user."""

    @property
    def open_samples(self) -> dict[SampleKey, Sample]:
        """Samples that none of the batches took."""
        batch_keys = {key for batch in self.batches for group in batch.groups for key in group.sample_keys()}
        return {key: sample for key, sample in self.samples.items() if key not in batch_keys}


def read_journal(directory: Path, after_step: int) -> Recovered:
    """Return what the journal holds for a run that resumes from the checkpoint of step `after_step` (0: no
    checkpoint). Nothing is changed on disk; a directory that does not exist is an empty journal. Raises
    JournalError if another version of the program wrote it, and OSError if it cannot be read.

    Damaged records are left out, and counted in the notes. A batch that is incomplete for that reason is not
    replayed. Nor are later batches, because weights trained on it sampled them. Only the missing samples are
    then requested again; responses sampled with weights up to that batch are kept.
    """
    state = _State(after_step)
    damages: dict[int, list[Damage]] = {}
    for number, entry in entries(directory, after_step):
        if isinstance(entry, Damage):
            damages.setdefault(number, []).append(entry)
            state.is_damaged |= not entry.is_torn
        else:
            state.take(entry)
    notes = [
        _damage_note(segment_path(directory, number), segment_damages)
        for number, segment_damages in damages.items()
    ]
    batches: list[ClosedBatch] = []
    samples: dict[SampleKey, Sample] = {}
    step = after_step
    while (closed := state.closed.get(step + 1)) is not None and closed.is_complete:
        step += 1
        batches.append(closed.batch)
        samples |= closed.samples
    follows = state.settings is None or state.last_step == step
    if not follows:
        notes.append(
            f"{directory}: the journal ends at step {state.last_step} and has no complete batch of step "
            f"{step + 1}; prompts after step {step} are sampled again"
        )
    if state.is_damaged:
        samples |= state.trusted(step)
        if state.settings is None and samples:
            notes.append(
                f"{directory}: the record of the settings is lost; the samples are taken to have this "
                "run's settings"
            )
    elif follows:
        samples |= {key: sample for group in state.open.values() for key, sample in group.items()}
    is_whole = follows and not state.is_damaged
    return Recovered(state.settings, tuple(batches), samples, step, is_whole, tuple(notes))


def entries(directory: Path, after_step: int) -> Iterator[tuple[int, Entry | Damage]]:
    """Yield (segment number, entry), as written, for everything that a run after `after_step` may need, and
    the damage in between. Raises JournalError if another version of the program wrote it."""
    numbers = segment_numbers(directory)
    first = _first_needed(directory, numbers, after_step)
    expected = first
    for number in (number for number in numbers if number >= first):
        if number != expected:
            yield expected, Damage(0, "this segment is missing")
        for entry in _entries(directory, number):
            is_end = isinstance(entry, Damage) and number == numbers[-1]
            yield number, entry if is_end or not isinstance(entry, Damage) else replace(entry, is_torn=False)
        expected = number + 1


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of a segment."""
    return directory / f"{number:06d}{_SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the existing segments, oldest first."""
    stems = (path.stem for path in directory.glob(f"*{_SUFFIX}"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def settle(groups: dict[GroupId, dict[SampleKey, T]], batch: ClosedBatch) -> dict[SampleKey, T]:
    """Remove the groups that a batch trains on or drops from the open ones, and return the values of those it
    trains on."""
    for dropped in batch.dropped:
        groups.pop(dropped.id, None)
    return {key: value for group in batch.groups for key, value in groups.pop(group.id, {}).items()}


def _first_needed(directory: Path, numbers: list[int], after_step: int) -> int:
    """Return the segment to start from. Older ones are not read, so damage there does no harm."""
    for number in reversed(numbers):
        begin = next(_entries(directory, number), None)
        if isinstance(begin, SegmentStart) and begin.saved <= after_step:
            return max(begin.needed_from, numbers[0])
    return numbers[0] if numbers else 0


def _entries(directory: Path, number: int) -> Iterator[Entry | Damage]:
    path = segment_path(directory, number)
    is_empty = True
    for record in records(path):
        is_empty = False
        yield record if isinstance(record, Damage) else _entry(path, record)
    if is_empty:
        yield Damage(0, "the segment is empty", is_torn=True)


def _entry(path: Path, record: Record) -> Entry | Damage:
    try:
        entry = decode(record.payload)
    except MalformedEntryError as error:
        return Damage(record.offset, str(error))
    except JournalError as error:
        raise JournalError(f"{path}: {error}; move {path.parent} away, or use that version") from None
    if isinstance(entry, SegmentStart) != (record.offset == 0):
        return Damage(record.offset, "an entry is in the wrong place")
    return entry


def _damage_note(path: Path, damages: list[Damage]) -> str:
    places = ", ".join(f"{damage.problem} (at byte {damage.offset})" for damage in damages[:_MOST_PLACES])
    and_more = f" and {len(damages) - _MOST_PLACES} more" if len(damages) > _MOST_PLACES else ""
    if all(damage.is_torn for damage in damages):
        return f"{path}: {places}; that record is not used"
    records_ = "1 damaged record is" if len(damages) == 1 else f"{len(damages)} damaged records are"
    return f"{path}: {records_} left out, and what follows is kept: {places}{and_more}"


@dataclass
class _Closed:
    batch: ClosedBatch
    samples: dict[SampleKey, Sample]

    @property
    def is_complete(self) -> bool:
        """True if no segment with its samples has been deleted."""
        return all(key in self.samples for group in self.batch.groups for key in group.sample_keys())


@dataclass
class _State:
    """The state after the entries so far."""

    after_step: int
    settings: str | None = None
    last_step: int = 0
    """Number of the last batch that the journal knows to be closed."""
    open: dict[GroupId, dict[SampleKey, Sample]] = field(default_factory=dict)
    closed: dict[int, _Closed] = field(default_factory=dict)
    is_damaged: bool = False
    """True if records are missing among those that count."""
    doubtful: set[GroupId] = field(default_factory=set)
    """Groups that a batch before the checkpoint may have trained on; the batch's record is lost."""

    def take(self, entry: Entry) -> None:
        match entry:
            case Sampled(key, sample):
                self.open.setdefault(key.group, {})[key] = sample
            case ClosedBatch(step):
                samples = settle(self.open, entry)
                if step <= self.last_step:  # the record of a rewind is lost
                    self._rewind(step - 1)
                self._reach(step - 1)
                if step > self.after_step:
                    self.closed[step] = _Closed(entry, samples)
                self.last_step = step
            case SegmentStart():
                self._begin(entry)

    def trusted(self, step: int) -> dict[SampleKey, Sample]:
        """Return what is usable for batches after `step` if records are missing: responses of the policies up
        to that step. Corrections are left out, since their response may be missing."""
        groups = [closed.samples for number, closed in self.closed.items() if number > step]
        groups += [samples for group, samples in self.open.items() if group not in self.doubtful]
        return {
            key: sample
            for samples in groups
            for key, sample in samples.items()
            if key.kind == "response"
            and max((version for _, version in sample.versions), default=math.inf) <= step
        }

    def _begin(self, begin: SegmentStart) -> None:
        changed = self.settings is not None and begin.settings != self.settings
        self.settings = begin.settings
        if begin.rewound is not None:
            self._rewind(begin.rewound)
            self.is_damaged = False  # earlier losses no longer count, or leave a batch incomplete
            self.doubtful.clear()
            return
        if changed or begin.last_step < self.last_step:  # the record of a rewind is lost
            self._rewind(min(begin.last_step, self.after_step) if changed else begin.last_step)
        self._reach(begin.last_step)

    def _reach(self, step: int) -> None:
        """Note that all batches up to this step were closed, whether or not their records exist."""
        if self.last_step < min(step, self.after_step):
            self.doubtful |= self.open.keys()
        self.last_step = max(self.last_step, step)

    def _rewind(self, step: int) -> None:
        self.open.clear()
        self.closed = {number: closed for number, closed in self.closed.items() if number <= step}
        self.last_step = step
