"""The parent of a process that runs code of the user's: nothing that this starts outlives it.

Started as `python -I -S supervisor.py OWNER CONNECTION PRINTED NAME COMMAND…`, so that it imports nothing of
the package. It runs COMMAND, in which {owner} stands for its own process id, in a new session, and hands it
the descriptor CONNECTION. It adopts orphans, and kills all when the command ends, the owner dies, or at a
SIGTERM. The first PRINTED bytes that they print go to its stderr; the rest is counted.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
_END_SECONDS = 5
"""Seconds after which the supervisor ends in any case: the kernel may be unable to end a process, or stderr
may be full."""


def main() -> None:
    """Run the command until it ends or must be ended."""
    owner, connection, printed, name, *command = sys.argv[1:]
    supervisor = _Supervisor(int(printed), name)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(owner):
        sys.exit("the owner of this process is gone")
    supervisor.start([word.replace("{owner}", str(os.getpid())) for word in command])
    os.close(int(connection))  # it must close when the worker ends
    supervisor.watch()
    supervisor.end()


class _Supervisor:
    """One process of the user's code, the worker, and what it prints."""

    def __init__(self, printed: int, name: str):
        self._worker, self._status = -1, 0
        """Process id and wait status."""
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the signal wakes `watch`
        signal.signal(signal.SIGTERM, lambda *_: self.end())  # also while a write to stderr waits
        output, self._theirs = os.pipe()
        os.set_blocking(output, False)
        self._prints = _Prints(output, printed, name)

    def start(self, command: list[str]) -> None:
        self._worker = os.fork()
        if self._worker == 0:
            os.setsid()  # signals to the worker's group do not reach the supervisor
            for stream in (1, 2):
                os.dup2(self._theirs, stream)
            os.execv(command[0], command)
        os.close(self._theirs)

    def watch(self) -> None:
        """Pass on what is printed until the worker ends."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._prints.descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._prints.descriptor:
                    if not self._prints.take():
                        poll.unregister(descriptor)
                elif os.read(descriptor, _CHUNK) and self._reap(os.WNOHANG):
                    return

    def end(self) -> None:
        """Kill all descendants, and end as the worker did, so that the owner can see how it ended."""
        # SIG_IGN would make Python print an error about a signal that came a moment before
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END_SECONDS)
        while children := _children():
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._reap(0)  # its own children are the supervisor's now
        self._prints.finish()
        if os.WIFSIGNALED(self._status):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            number = os.WTERMSIG(self._status)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(os.waitstatus_to_exitcode(self._status))

    def _reap(self, options: int) -> bool:
        """Collect children that have ended, the first as `options` say; return whether one is the worker."""
        worker_ended = False
        with _sigterm_held_back(), suppress(ChildProcessError):
            while (child := os.waitpid(-1, options))[0]:
                options = os.WNOHANG
                if child[0] == self._worker:
                    self._status, worker_ended = child[1], True
        return worker_ended


@contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """Hold back SIGTERM, whose handler ends this process, until what is read inside is stored or counted."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


class _Prints:
    """Passes on what the worker and its descendants print, up to a bound."""

    def __init__(self, descriptor: int, limit: int, name: str):
        self.descriptor = descriptor
        self._left, self._limit, self._name = limit, limit, name
        self._omitted = 0

    def take(self) -> bool:
        """Pass on the next output in the pipe; False when the pipe is empty or at its end."""
        try:
            with _sigterm_held_back():
                read = os.read(self.descriptor, _CHUNK)
                passed_on = read[: self._left]
                self._left -= len(passed_on)
                is_first = len(passed_on) < len(read) and not self._omitted
                self._omitted += len(read) - len(passed_on)
        except BlockingIOError:
            return False
        _say(passed_on)
        if is_first:
            _say(f"\n[{self._name} printed more than {self._limit:,} bytes; the rest is left out]\n".encode())
        return bool(read)

    def finish(self) -> None:
        """Pass on the rest, and say how much was left out."""
        while self.take():
            pass
        if self._omitted:
            _say(f"[{self._omitted:,} bytes that {self._name} printed were left out]\n".encode())


def _say(text: bytes) -> None:
    with suppress(OSError):  # no reader is left
        while text:
            text = text[os.write(2, text) :]


def _children() -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent == os.getpid():
                pids.append(int(path.parent.name))
    return pids


if __name__ == "__main__":
    main()
