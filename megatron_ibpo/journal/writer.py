"""The writer of a journal, and the index of the segments that a recovery needs."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.basics.user_files import flush
from megatron_ibpo.journal.entries import (
    ClosedBatch,
    Damage,
    Entry,
    GroupId,
    JournalError,
    Sampled,
    SampleKey,
    SegmentStart,
    encode,
    framed,
)
from megatron_ibpo.journal.recovery import Recovered, entries, segment_numbers, segment_path, settle


@dataclass
class Index:
    """Locations of the records needed to resume from the checkpoint of step `saved`."""

    saved: int
    last_step: int
    """Number of the last batch that the journal knows to be closed."""
    _open: dict[GroupId, dict[SampleKey, int]] = field(default_factory=dict)
    """Segment of every sample that no batch has taken or dropped."""
    _batches: dict[int, int] = field(default_factory=dict)
    """Step → the first segment that its replay needs, for batches after the saved step."""
    _settled: dict[GroupId, int] = field(default_factory=dict)
    """Group that one of these batches took or dropped → the batch's step."""

    def needed_from(self, present: int, rewound: int | None = None) -> int:
        """Return the first segment that a recovery needs; `present` if it needs no earlier one. Compute as if
        the journal had been rewound to the step `rewound`, if that is given."""
        if rewound is not None:
            return min([present, *(segment for step, segment in self._batches.items() if step <= rewound)])
        samples = (segment for group in self._open.values() for segment in group.values())
        return min([present, *samples, *self._batches.values()])

    def take(self, segment: int, entry: Entry) -> None:
        """Note an entry of this segment."""
        match entry:
            case Sampled(key):
                self._open.setdefault(key.group, {})[key] = segment
            case ClosedBatch(step):
                samples = settle(self._open, entry)
                self._forget(lambda number: number >= step)  # in case the record of a rewind is lost
                self.last_step = step
                if step > self.saved:
                    self._batches[step] = min([segment, *samples.values()])
                    self._settled |= dict.fromkeys(entry.settled, step)
            case SegmentStart(last_step=last_step, rewound=None):
                self.last_step = max(self.last_step, last_step)
            case SegmentStart(rewound=int(step)):
                self._open.clear()
                self._forget(lambda number: number > step)
                self.last_step = step

    def save(self, step: int) -> None:
        """Note that the checkpoint of this step is complete: nothing up to it needs to be replayed."""
        self.saved = step
        self._forget(lambda number: number <= step)

    def check_sample(self, key: SampleKey) -> None:
        """Raise ValueError for a sample that the journal has, or whose group is settled."""
        if key in self._open.get(key.group, {}):
            raise ValueError(f"{key} is in the journal already")
        if (step := self._settled.get(key.group)) is not None:
            raise ValueError(f"{key}: the batch of step {step} has closed or dropped its group")

    def check_batch(self, batch: ClosedBatch) -> None:
        """Raise ValueError for a batch out of turn, or one that does not name all samples of its groups."""
        if batch.step != self.last_step + 1:
            raise ValueError(
                f"a batch of step {batch.step} cannot follow step {self.last_step}; a run that resumes "
                "from an earlier step must rewind its journal first"
            )
        for group in batch.groups:
            named, stored = set(group.sample_keys()), set(self._open.get(group.id, {}))
            if named != stored:
                raise ValueError(
                    f"the batch of step {batch.step} names other samples of prompt {group.prompt_index} "
                    f"(attempt {group.attempt}) than the journal has: {len(named - stored)} are missing, "
                    f"{len(stored - named)} too many"
                )

    def _forget(self, chosen: Callable[[int], bool]) -> None:
        """Forget the batches of the chosen steps."""
        self._batches = {step: segment for step, segment in self._batches.items() if not chosen(step)}
        self._settled = {group: step for group, step in self._settled.items() if not chosen(step)}


SEGMENT_BYTES = 64 * 1024**2
"""Size from which a new segment begins. Small against --journal-keep, since only whole segments are
deleted."""

log = logging.getLogger(__name__)


class Journal(AbstractContextManager["Journal"]):
    """Appends scored samples and closed batches to the segments of a directory.

    A record is one call of write(). Records survive the death of this process once `sampled` or `closed` has
    returned, and the death of the machine once `closed` has returned. On a full disk `sampled`, `closed` and
    `rewound` raise OSError and leave the journal unchanged, so they can be called again. Safe to use from
    several threads.
    """

    def __init__(self, directory: Path, keep_bytes: int, settings: str, step: int) -> None:
        """Open the journal, or start one. An unfinished record at its end is cut off; damaged bytes stay
        where they are, between records that are read. Raises JournalError if another process writes in it or
        another version of the program wrote it, and OSError if it cannot be read or written.

        Args:
            keep_bytes: most bytes of segments to keep that no recovery needs (--journal-keep).
            settings: settings of this run, for `Recovered.settings`.
            step: step of the checkpoint to resume from; 0 without one.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._keep_bytes = keep_bytes
        self._settings = settings
        self._holder = _lock(directory)
        self._lock = threading.Lock()
        self._file: int | None = None
        """The present segment, once something is written to it."""
        self._full: list[int] = []
        """Earlier segments that may not have reached the disk itself."""
        self._unsynced_batch: ClosedBatch | None = None
        try:
            self._index = _indexed(directory, step)
            numbers = segment_numbers(directory)
            self._sizes = {number: segment_path(directory, number).stat().st_size for number in numbers}
            """Segment number → its bytes."""
            self._number = max(numbers, default=0) + 1
            needed_from = self._index.needed_from(self._number)
            self.pending_bytes = sum(size for number, size in self._sizes.items() if number >= needed_from)
            """Bytes written since the last saved step. When just opened, those that a recovery from its
            checkpoint needs."""
            if self._index.last_step < step:  # it lacks later batches
                self.rewound(step)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def sampled(self, key: SampleKey, sample: Sample) -> None:
        """Append a scored sample. Raises ValueError if the journal already has it, or its group is closed or
        dropped, TypeError for an array of a dtype that `Sample` does not allow, and OSError without room."""
        entry = Sampled(key, sample)
        record = framed(encode(entry))
        with self._lock:
            self._index.check_sample(key)
            self._append(record)
            self._index.take(self._number, entry)

    def closed(self, batch: ClosedBatch) -> None:
        """Append the batch that a step trains on, and sync all samples so far to the disk itself. Raises
        ValueError if its step does not follow that of the last batch, or it does not name exactly the samples
        of its groups that the journal has, and OSError without room."""
        with self._lock:
            if batch is not self._unsynced_batch:  # otherwise an earlier call did all but the sync
                self._index.check_batch(batch)
                self._append(framed(encode(batch)))
                self._index.take(self._number, batch)
                self._unsynced_batch = batch
            full = self._full
            present = [] if self._file is None else [self._file]
        self._sync(full + present)  # not under the lock, so that other threads can append meanwhile
        with self._lock:
            self._full = self._full[len(full) :]
            self._unsynced_batch = None
        for file in full:
            os.close(file)

    def saved(self, step: int) -> None:
        """Note that the checkpoint of this step is complete on disk. Start a new segment, and delete the
        oldest segments that no recovery from this checkpoint needs, until the rest of them are within the
        bound."""
        with self._lock:
            self._index.save(step)
            self._end_segment()
            self.pending_bytes = 0
            needed_from = self._index.needed_from(self._number)
            spare = [number for number in sorted(self._sizes) if number < needed_from]
            excess = sum(self._sizes[number] for number in spare) - self._keep_bytes
            for number in spare:
                if excess <= 0:
                    break
                segment_path(self.directory, number).unlink(missing_ok=True)
                excess -= self._sizes.pop(number)

    def rewound(self, step: int) -> None:
        """Stop following the journal after this step: batches of later steps, and samples of open groups, no
        longer count and may be sampled and closed again. Raises OSError if there is no room."""
        with self._lock:
            self._end_segment()
            begin = self._begin(rewound=step)
            self._write(framed(encode(begin)))
            self._index.take(self._number, begin)

    def follow(self, recovered: Recovered) -> None:
        """Bring the journal to the state in `recovered`, unless it is already there: rewind to the last of
        its batches, then append the samples of open groups again. Raises OSError if there is no room."""
        if recovered.is_whole:
            return
        self.rewound(recovered.last_step)
        for key, sample in recovered.open_samples.items():
            self.sampled(key, sample)

    def close(self) -> None:
        """Let other processes write here. Appended records stay."""
        with self._lock:
            self._end_segment()
            for file in self._full:
                os.close(file)
            self._full = []
            self._holder.close()

    def _sync(self, files: list[int]) -> None:
        """Sync these files, and the names of new ones, to the disk itself."""
        try:
            for file in files:
                os.fsync(file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.directory)) from None
        flush(self.directory)

    # all methods below need the lock

    def _append(self, record: bytes) -> None:
        """Write a record to the present segment, or to the next one if that is full."""
        if self._sizes.get(self._number, 0) >= SEGMENT_BYTES:
            self._end_segment()
        is_new = self._number not in self._sizes
        self._write(framed(encode(self._begin())) + record if is_new else record)

    def _write(self, data: bytes) -> None:
        if self._holder.closed:
            raise ValueError(f"the journal in {self.directory} is closed")
        path = segment_path(self.directory, self._number)
        if self._file is None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        previous_size = self._sizes.get(self._number, 0)
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, previous_size)  # records after a partial one could not be read
            raise OSError(error.errno, error.strerror, str(path)) from None
        self._sizes[self._number] = previous_size + len(data)
        self.pending_bytes += len(data)

    def _begin(self, rewound: int | None = None) -> SegmentStart:
        """Return the first entry of the present segment."""
        needed_from = self._index.needed_from(self._number, rewound)
        index = self._index
        return SegmentStart(self._settings, index.saved, index.last_step, needed_from, rewound)

    def _end_segment(self) -> None:
        if self._file is None:
            return
        if self._number in self._sizes:
            self._full.append(self._file)
            self._number += 1
        else:  # there was no room for its first record
            os.close(self._file)
            segment_path(self.directory, self._number).unlink()
        self._file = None


def _indexed(directory: Path, step: int) -> Index:
    """Return where the records are that a run from this step may need; cut off an unfinished last one."""
    index = Index(saved=step, last_step=0 if segment_numbers(directory) else step)
    torn: tuple[Path, int] | None = None
    for segment, entry in entries(directory, step):
        if not isinstance(entry, Damage):
            index.take(segment, entry)
        elif entry.is_torn:
            torn = segment_path(directory, segment), entry.offset
    if torn is not None:
        _cut(*torn)
    return index


def _cut(path: Path, size: int) -> None:
    log.info("%s: the bytes from %d on are an unfinished record; they are cut off", path, size)
    if size == 0:
        path.unlink()
    else:
        os.truncate(path, size)


def _lock(directory: Path) -> IO[str]:
    """Lock the directory until the returned file is closed or this process ends."""
    path = directory / "lock"
    holder = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder.seek(0)
        pid = holder.read().strip()
        holder.close()
        raise JournalError(f"{directory}: process {pid} is writing this journal; end it first") from None
    holder.truncate(0)
    holder.write(f"{os.getpid()}\n")
    holder.flush()
    return holder
