"""The one that writes a journal."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import IO

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.journal.entries import Begin, ClosedBatch, JournalError, Sampled, SampleKey, encode
from megatron_ibpo.journal.framing import Damage, framed
from megatron_ibpo.journal.index import Index
from megatron_ibpo.journal.recovery import Recovered, entries, segment_numbers, segment_path

SEGMENT_BYTES = 64 * 1024**2
"""From this size on a new segment begins: small against --journal-keep, since only whole ones are deleted."""

log = logging.getLogger(__name__)


class Journal:
    """Appends scored samples and closed batches to the segments of a directory.

    A record is one call of write(): what `sampled` or `closed` has returned from outlives the death of this
    process, and what `closed` has returned from that of the machine. Safe to use from several threads.

    On a full disk `sampled`, `closed` and `rewound` raise OSError and leave the journal as it was: they may
    be called again.
    """

    def __init__(self, directory: Path, keep_bytes: int, settings: str, step: int) -> None:
        """Open the journal, or begin one. An unfinished record at its end is cut off; what is damaged stays
        where it is, between records that are read.

        Args:
            keep_bytes: most bytes of segments that are kept though no recovery needs them (--journal-keep).
            settings: of this run, for `Recovered.settings`.
            step: of the checkpoint that the run goes on from; 0 without one.

        Raises:
            JournalError: another process writes in it, or another version of the program wrote it.
            OSError: it cannot be read or written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._keep_bytes = keep_bytes
        self._settings = settings
        self._holder = _alone(directory)
        self._lock = threading.Lock()
        self._file: int | None = None
        """The present segment, once something is written to it."""
        self._full: list[int] = []
        """Segments before it that may not have reached the disk itself."""
        self._unsynced_batch: ClosedBatch | None = None
        try:
            self._index = _indexed(directory, step)
            numbers = segment_numbers(directory)
            self._sizes = {number: segment_path(directory, number).stat().st_size for number in numbers}
            """Bytes of every segment, by number."""
            self._number = max(numbers, default=0) + 1
            """Number of the present segment."""
            needed_from = self._index.needed_from(self._number)
            self._pending = sum(size for number, size in self._sizes.items() if number >= needed_from)
            if self._index.last_step < step:  # it lacks what was closed since; what is open in it may be, too
                self.rewound(step)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pending_bytes(self) -> int:
        """Written since the last saved step; just opened, what a recovery from its checkpoint needs."""
        return self._pending

    def sampled(self, key: SampleKey, sample: Sample) -> None:
        """Append a scored sample.

        Raises:
            ValueError: the journal has this sample already, or its group is closed or dropped.
            TypeError: an array of it has a dtype that `Sample` does not allow.
            OSError: no room.
        """
        entry = Sampled(key, sample)
        record = framed(encode(entry))
        with self._lock:
            self._index.check_sample(key)
            self._append(record)
            self._index.take(self._number, entry)

    def closed(self, batch: ClosedBatch) -> None:
        """Append what a step trains on, and see to it that all samples so far are on the disk itself.

        Raises:
            ValueError: its step does not follow that of the last batch, or it names samples that the journal
                does not have, or not all that it has of a group.
            OSError: no room.
        """
        with self._lock:
            if batch is not self._unsynced_batch:  # else all but reaching the disk was done the time before
                self._index.check_batch(batch)
                self._append(framed(encode(batch)))
                self._index.take(self._number, batch)
                self._unsynced_batch = batch
            full = self._full
            present = [] if self._file is None else [self._file]
        self._sync(full + present)  # not under the lock: meanwhile others may append
        with self._lock:
            self._full = self._full[len(full) :]
            self._unsynced_batch = None
        for file in full:
            os.close(file)

    def saved(self, step: int) -> None:
        """The checkpoint of this step is whole on disk. A new segment begins, and the oldest of those that no
        recovery from this checkpoint needs are deleted until the others are within the bound."""
        with self._lock:
            self._index.save(step)
            self._end_segment()
            self._pending = 0
            needed_from = self._index.needed_from(self._number)
            spare = [number for number in sorted(self._sizes) if number < needed_from]
            excess = sum(self._sizes[number] for number in spare) - self._keep_bytes
            for number in spare:
                if excess <= 0:
                    break
                segment_path(self.directory, number).unlink(missing_ok=True)
                excess -= self._sizes.pop(number)

    def rewound(self, step: int) -> None:
        """The run does not follow the journal beyond this step: batches of later steps, and samples of groups
        that are open, count no more and may be sampled and closed anew.

        Raises:
            OSError: no room.
        """
        with self._lock:
            self._end_segment()
            begin = self._begin(rewound=step)
            self._write(framed(encode(begin)))
            self._index.take(self._number, begin)

    def follow(self, recovered: Recovered) -> None:
        """Begin where a run goes on with `recovered`, if the journal is not that already: rewound to the last
        of its batches, behind which the samples of open groups stand again.

        Raises:
            OSError: no room.
        """
        if recovered.is_whole:
            return
        self.rewound(recovered.last_step)
        for key, sample in recovered.open_samples.items():
            self.sampled(key, sample)

    def close(self) -> None:
        """Let others write here. What was appended stays."""
        with self._lock:
            self._end_segment()
            for file in self._full:
                os.close(file)
            self._full = []
            self._holder.close()

    def _sync(self, files: list[int]) -> None:
        """Let these files, and the names of new ones, reach the disk itself."""
        try:
            for file in files:
                os.fsync(file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.directory)) from None
        _sync_directory(self.directory)

    # all below with the lock held

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
        before = self._sizes.get(self._number, 0)
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, before)  # what follows a part of a record could not be read
            raise OSError(error.errno, error.strerror, str(path)) from None
        self._sizes[self._number] = before + len(data)
        self._pending += len(data)

    def _begin(self, rewound: int | None = None) -> Begin:
        """The first entry of the present segment."""
        needed_from = self._index.needed_from(self._number, rewound)
        index = self._index
        return Begin(self._settings, index.saved, index.last_step, needed_from, rewound)

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
    """Where all stands that a run from this step may need; an unfinished record at the end is cut off."""
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
    log.info("%s: the bytes from %d on are an unfinished record and are cut off", path, size)
    if size == 0:
        path.unlink()
    else:
        os.truncate(path, size)


def _alone(directory: Path) -> IO[str]:
    """Holds the directory until it is closed or this process ends."""
    path = directory / "lock"
    holder = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder.seek(0)
        who = holder.read().strip()
        holder.close()
        raise JournalError(f"{directory}: process {who} writes in this journal; end it first") from None
    holder.truncate(0)
    holder.write(f"{os.getpid()}\n")
    holder.flush()
    return holder


def _sync_directory(directory: Path) -> None:
    """Names of new files reach the disk itself."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
