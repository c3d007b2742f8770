"""A process of ours under a supervisor, as its owner sees it."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_CLOSE_TIMEOUT = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Supervised:
    """A process, and everything that it has started, which end with it or with its owner.

    The kernel ends it when the thread that started it ends, so the thread must live as long.
    """

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

    def how_it_ended(self) -> str:
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
