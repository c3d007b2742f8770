"""A full disk: whoever writes waits for room, for a while."""

import errno
import io
import os
import shutil
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


class DiskWait:
    """The wait of a run for room on its disk. All that write share one deadline, which counts from the first
    write that found no room until one finds some. So a run whose responses come in one by one ends once, not
    after a wait for each."""

    def __init__(self, wait: float, say: Callable[[str], object], look_every: float = LOOK_EVERY_S):
        """
        Args:
            wait: seconds.
            say: is told when the waiting begins and when it ends.
        """
        self._wait, self._say, self._look_every = wait, say, look_every
        self._full_since: float | None = None

    def write(self, write: Callable[[], T]) -> T:
        """Return what `write` gives, tried again while the disk is full.

        Args:
            write: leaves nothing in part under a final name when it fails, and may be called again.

        Raises:
            DiskFullError: there has been no room for `wait` seconds.
        """
        while True:
            try:
                result = write()
            except OSError as error:
                if not is_full(error):
                    raise
                self._wait_or_raise(error)
                continue
            if self._full_since is not None:
                waited, self._full_since = time.monotonic() - self._full_since, None
                self._say(f"there is room again after {waited:.0f} s; the run goes on")
            return result

    def _wait_or_raise(self, error: OSError) -> None:
        now = time.monotonic()
        if self._full_since is None:
            self._full_since = now
            self._say(f"the disk is full ({error}): the run waits {self._wait:g} s for room, --disk-wait")
        if now - self._full_since >= self._wait:
            raise DiskFullError(f"no room on the disk for {self._wait:g} s, --disk-wait: {error}") from None
        time.sleep(self._look_every)


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
