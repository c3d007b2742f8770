"""Addresses, sockets and environment variables, by which the processes of a run meet. Imports no torch."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
NODE_ADDRESS = "IBPO_NODE_ADDRESS"
"""Environment variable with this node's address, as the other processes of the run reach it."""
STORE_DESCRIPTOR = "IBPO_STORE_DESCRIPTOR"
"""Environment variable of rank 0 with the file descriptor of a socket that already listens at MASTER_PORT. A
port that was only found free may be taken by the time that a rank has imported torch."""


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address and no other; if `port` is 0, at any free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def environment_number(name: str, default: int, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return the variable's value, or `default`. Raises ValueError for no whole number in the range."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ValueError(
            f"{name}={text[:40]!r} in the environment: must be a whole number between {least} and {most}"
        )
    return value


LONGEST_SOCKET = 107
"""Longest path of a Unix socket in bytes, a limit of Linux."""
FALLBACKS = ("/tmp", "/dev/shm")
RANDOM_PART = 8
"""Characters that mkdtemp appends."""


def remove_private(directory: Path) -> None:
    """Remove a directory of `private_directory`, even if others write into it at this moment. It is renamed
    first: a file that appears between the listing and the removal would keep the directory."""
    renamed = directory.with_name(f"{directory.name}.gone")
    with suppress(OSError):  # it is gone, or another process has renamed it and was killed then
        directory.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def private_directory(prefix: str, socket_bytes: int, fallbacks: Sequence[str] = FALLBACKS) -> Path:
    """Make a directory that other users of the machine cannot enter: in TMPDIR or, if that is too long, in
    one of `fallbacks`, with a line that says so. Raises OSError if there is no such place.

    Args:
        socket_bytes: length of the longest path of a socket within the directory, with its leading slash.
    """
    room = LONGEST_SOCKET - socket_bytes - len(f"/{prefix}") - RANDOM_PART
    default = tempfile.gettempdir()
    too_long = (
        f"TMPDIR={default} has {len(os.fsencode(default))} bytes, and the Unix sockets of {prefix}* leave it "
        f"{room} at most"
    )
    for place in (default, *fallbacks):
        if len(os.fsencode(place)) > room:
            continue
        try:
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        except OSError:
            if place == default:
                raise
            continue
        if place != default:
            print(f"{too_long}: {place} is used instead", file=sys.stderr, flush=True)
        return directory
    raise OSError(f"{too_long}; set TMPDIR to a shorter path that can be written")


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables within the block, and touch no other: native threads read them at any
    time, and `mock.patch.dict` would take all of them away and put them back."""
    previous = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables.keys() - previous.keys():
            del os.environ[name]
        os.environ |= previous
