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


def waiting_for_room(
    write: Callable[[], T], wait: float, say: Callable[[str], object], look_every: float = LOOK_EVERY_S
) -> T:
    """What `write` gives, tried again while the disk is full.

    Args:
        write: leaves nothing in part under a final name when it fails, and may be called again.
        wait: seconds.
        say: is told when the waiting begins and when it ends.

    Raises:
        DiskFullError: there was no room within `wait` seconds.
    """
    began: float | None = None
    while True:
        try:
            result = write()
        except OSError as error:
            if not is_full(error):
                raise
            now = time.monotonic()
            if began is None:
                began = now
                say(f"the disk is full ({error}): the run waits {wait:g} s for room, --disk-wait")
            if now - began >= wait:
                raise DiskFullError(f"no room on the disk for {wait:g} s, --disk-wait: {error}") from None
            time.sleep(look_every)
            continue
        if began is not None:
            say(f"there is room again after {time.monotonic() - began:.0f} s; the run goes on")
        return result


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
