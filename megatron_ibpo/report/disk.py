"""A full disk: whoever writes waits for room, for a while."""

import errno
import io
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LOOK_EVERY_S = 2.0


class DiskFullError(RuntimeError):
    """There was no room for as long as --disk-wait."""


def is_full(error: OSError) -> bool:
    """The disk, or the user's share of it, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class RoomOnDisk:
    """Makes a run's writes wait for room while the disk is full.

    All writers share one deadline, `wait` seconds after the disk first refused, however many they are: it is
    forgotten once a write that had to wait has succeeded. A writer that others overtake waits `wait` seconds
    itself at most.
    """

    def __init__(
        self,
        wait: float,
        say: Callable[[str], object],
        look_every: float = LOOK_EVERY_S,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """
        Args:
            wait: seconds.
            say: is told when the waiting begins and when it ends.
        """
        self._wait, self._say, self._look_every = wait, say, look_every
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._refused_since: float | None = None
        """When the disk first refused, of the waiting that goes on."""

    def waiting(self, write: Callable[[], T]) -> T:
        """Return what `write` gives, tried again while the disk is full. Safe to call from several threads.

        Args:
            write: leaves nothing in part under a final name when it fails, and may be called again.

        Raises:
            DiskFullError: there was no room until the deadline.
        """
        since: float | None = None
        while True:
            try:
                result = write()
            except OSError as error:
                if not is_full(error):
                    raise
                shared = self._refused(error)
                since = shared if since is None else min(since, shared)
                if self._now() - since >= self._wait:
                    raise DiskFullError(
                        f"no room on the disk for {self._wait:g} s, --disk-wait: {error}"
                    ) from None
                self._sleep(self._look_every)
                continue
            if since is not None:
                self._succeeded()
            return result

    def _refused(self, error: OSError) -> float:
        """Return since when the disk has refused."""
        with self._lock:
            is_first = self._refused_since is None
            since = self._now() if self._refused_since is None else self._refused_since
            self._refused_since = since
        if is_first:
            self._say(f"the disk is full ({error}): the run waits {self._wait:g} s for room, --disk-wait")
        return since

    def _succeeded(self) -> None:
        with self._lock:
            since, self._refused_since = self._refused_since, None
        if since is not None:
            self._say(f"there is room again after {self._now() - since:.0f} s; the run goes on")


def require_room(directory: Path, num_bytes: int) -> None:
    """Raises OSError, as a full disk does, where so much is not free."""
    if shutil.disk_usage(directory).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Append to an unbuffered file all of `data`, or nothing where that raises."""
    end = file.seek(0, io.SEEK_END)
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)  # needs no room
        raise
