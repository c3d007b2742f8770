"""Private temporary directories with paths short enough for Unix sockets."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LONGEST_SOCKET = 107
"""Longest path of a Unix socket in bytes, a limit of Linux."""
FALLBACKS = ("/tmp", "/dev/shm")
RANDOM_PART = 8
"""Characters that mkdtemp appends."""


def private_directory(prefix: str, socket_bytes: int, fallbacks: Sequence[str] = FALLBACKS) -> Path:
    """Make a directory that other users of the machine cannot enter: in TMPDIR or, if that is too long, in
    one of `fallbacks`, with a line that says so.

    Args:
        socket_bytes: length of the longest path of a socket within the directory, with its leading slash.

    Raises:
        OSError: no such directory can be made.
    """
    room = LONGEST_SOCKET - socket_bytes - len(f"/{prefix}") - RANDOM_PART
    wanted = tempfile.gettempdir()
    too_long = (
        f"TMPDIR={wanted} has {len(os.fsencode(wanted))} bytes, and the Unix sockets of {prefix}* leave it "
        f"{room} at most"
    )
    for place in (wanted, *fallbacks):
        if len(os.fsencode(place)) > room:
            continue
        try:
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        except OSError:
            if place == wanted:
                raise
            continue
        if place != wanted:
            print(f"{too_long}: {place} is used instead", file=sys.stderr, flush=True)
        return made
    raise OSError(f"{too_long}; set TMPDIR to a shorter path that can be written")
