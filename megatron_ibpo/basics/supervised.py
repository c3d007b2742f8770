"""Processes of ours under a supervisor, as their owner sees them; and the end of a process group (Linux)."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_CLOSE_TIMEOUT = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Supervised:
    """A process and everything that it starts, which end with it or with the thread that started it."""

    def __init__(
        self,
        command: Sequence[str],
        connection: socket.socket,
        *,
        printed: int,
        name: str,
        environment: Mapping[str, str] | None = None,
    ):
        """Start it.

        Args:
            command: in it, {owner} stands for the process id of its parent, for `die_with`.
            connection: its end of a connection to the owner, which it inherits.
            printed: bytes that it may print.
            name: what printed too much, for messages.
            environment: variables besides the owner's.
        """
        supervisor = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
        supervisor += [str(os.getpid()), str(connection.fileno()), str(printed), name]
        # what the owner can import, the process can
        path = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._supervisor = subprocess.Popen(
            [*supervisor, *command],
            pass_fds=[connection.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for its owner
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
            env=os.environ | path | dict(environment or {}),
        )

    def is_alive(self) -> bool:
        return self._supervisor.poll() is None

    def wait(self) -> int:
        """Return the status with which it ended, as subprocess does. Call it only when it is about to end."""
        return self._supervisor.wait(_CLOSE_TIMEOUT)

    def kill(self) -> None:
        """Have the supervisor kill the process and everything it has started."""
        if self.is_alive():
            self._supervisor.terminate()

    def exit_reason(self) -> str:
        """Return its signal or status, once it has ended."""
        status = self._supervisor.returncode
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    def end(self) -> None:
        """Kill it, and wait until it has ended."""
        self.kill()
        try:
            self._supervisor.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait(_CLOSE_TIMEOUT)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even if it then hangs in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent of this process has ended")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents have ended. A fork does not inherit this."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


SHARED_MEMORY = "/dev/shm/"
END_TIMEOUT_S = 20.0
"""Seconds to wait for killed processes to end: a driver may first have tens of GiB to free."""
LOOK_EVERY_S = 0.01


def end_group(group: int, known_inodes: Iterable[int] = ()) -> None:
    """Kill all processes of `group` but the caller, and remove the shared memory that only they used. Returns
    when they have ended, and so have freed their GPUs' memory. `known_inodes` is an earlier result of
    `shared_memory` for the group, for members that have already ended."""
    inodes = shared_memory(group) | set(known_inodes)
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
    """Return the inodes of the shared memory that processes of `group` have mapped."""
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
