"""Waiting for room on a full disk, up to a limit."""

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LOOK_EVERY_S = 2.0


class DiskFullError(RuntimeError):
    """The disk stayed full for as long as --disk-wait."""


def is_full(error: OSError) -> bool:
    """Return whether the error means that the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass
class DiskWait:
    """The wait of a run for room on its disk. Safe to use from several threads.

    All writers share one deadline, which counts from the first write that found no room until one finds some.
    So a run whose responses arrive one by one ends once, not after a wait for each.
    """

    wait: float
    """Limit in seconds."""
    say: Callable[[str], object]
    """Called when the waiting begins and when it ends."""
    look_every: float = LOOK_EVERY_S
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _full_since: float | None = None
    _waiting: int = 0
    """Number of writes that are waiting."""

    def write(self, write: Callable[[], T]) -> T:
        """Return the result of `write`, retried while the disk is full.

        Args:
            write: leaves no partial file under a final name when it fails, and may be called again.

        Raises:
            DiskFullError: the disk has been full for `wait` seconds.
        """
        since = math.inf  # small writes that find room do not extend the wait of a large one
        try:
            while True:
                try:
                    result = write()
                except OSError as error:
                    if not is_full(error):
                        raise
                    since = min(since, self._refused(error, is_new=since == math.inf))
                    if self.now() - since >= self.wait:
                        raise DiskFullError(
                            f"the disk stayed full for {self.wait:g} s (--disk-wait): {error}"
                        ) from None
                    self.sleep(self.look_every)
                    continue
                self._succeeded(waited=since < math.inf)
                return result
        finally:
            if since < math.inf:
                with self._lock:
                    self._waiting -= 1

    def _refused(self, error: OSError, *, is_new: bool) -> float:
        """Return the time since when the disk has been full."""
        with self._lock:
            self._waiting += is_new
            is_first = self._full_since is None
            since = self.now() if self._full_since is None else self._full_since
            self._full_since = since
        if is_first:
            self.say(
                f"the disk is full ({error}): the run waits up to {self.wait:g} s for space (--disk-wait)"
            )
        return since

    def _succeeded(self, *, waited: bool) -> None:
        with self._lock:
            if self._waiting and not waited:  # a small write's success says nothing about those that wait
                return
            since, self._full_since = self._full_since, None
        if since is not None:
            self.say(f"the disk has space again after {self.now() - since:.0f} s; the run continues")


def require_room(directory: Path, num_bytes: int) -> None:
    """Raise OSError, as a full disk does, unless this much is free."""
    if shutil.disk_usage(directory).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
