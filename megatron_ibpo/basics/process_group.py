"""Ending a process group by force, with the shared memory that its members can no longer remove (Linux)."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
END_TIMEOUT_S = 20.0
"""Seconds to wait for killed processes to end: a driver may first have tens of GiB to free."""
LOOK_EVERY_S = 0.01


def end_group(group: int, known: Iterable[int] = ()) -> None:
    """Kill all processes of `group` but the caller, and remove the shared memory that only they used. Returns
    when they have ended, and so have freed their GPUs' memory.

    Args:
        known: earlier result of `shared_memory` for the group, for members that have already ended.
    """
    inodes = shared_memory(group) | set(known)
    for pid in _members(group):
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_TIMEOUT_S
    while set(_members(group)) - {os.getpid()} and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    if inodes:
        inodes -= {inode for pid in _processes() if _group(pid) != group for inode in _mapped(pid)}
        for entry in os.scandir(SHARED_MEMORY):
            if entry.inode() in inodes:
                Path(entry).unlink(missing_ok=True)


def shared_memory(group: int) -> set[int]:
    """Return the inodes of the shared memory that processes of `group` have mapped. (Semaphores are mapped
    under a name that no longer exists.)"""
    return {inode for pid in _members(group) for inode in _mapped(pid)}


def _members(group: int) -> list[int]:
    return [pid for pid in _processes() if _group(pid) == group]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _group(pid: int) -> int | None:
    """Return the process group of `pid`; None if it has ended, even if it is still a zombie."""
    with suppress(OSError):
        state, _parent, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
        return int(group) if state != "Z" else None
    return None


def _mapped(pid: int) -> set[int]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {int(line.split(maxsplit=5)[4]) for line in lines if SHARED_MEMORY in line}
    return set()
