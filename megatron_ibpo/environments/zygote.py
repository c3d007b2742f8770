"""The process that imports an environment once, and forks a process for each of its episodes.

Started by `processes` as `python -m megatron_ibpo.environments.zygote FD OWNER TARGET REWARDS [DIRECTORY]`
under a supervisor, the OWNER; REWARDS is --environment-reward as a JSON list. It writes one line, ["ready",
threads] or ["failed", why]. Then every byte on FD comes with a socket, on which a process serves an episode.

A fork takes milliseconds, and episodes tend to begin all at once. So when the zygote has nothing else to do,
it forks spare processes, in which episodes begin, until there are as many as were needed at one time.

The owner of the socket ends the episode by shutting it down for writing. Once the process has ended, by
itself or not, the zygote kills what it has left running, and closes the socket. In DIRECTORY, if given, every
episode has a temporary directory. The kernel kills the episodes when the zygote dies.
"""

import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.reward_value import WRONG, ResponseError, read_reward
from megatron_ibpo.basics.supervised import adopt_orphans, die_with
from megatron_ibpo.basics.text import error_text, fault_text, printable, shown
from megatron_ibpo.config import ConfigError
from megatron_ibpo.environments.protocol import Environment, EpisodeFaultError
from megatron_ibpo.environments.session import DEATH, line

_CHUNK = 1 << 12


def main() -> None:
    """Import the environment and fork episodes until the connection closes."""
    fd, owner, target, rewards, *directory = sys.argv[1:]
    die_with(int(owner))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    try:
        from megatron_ibpo.environments.frameworks import load_environment

        make = load_environment(target, json.loads(rewards))
    except BaseException as error:
        is_refused = isinstance(error, ConfigError)
        reason = printable(str(error)) if is_refused else f"--environment {target}: {error_text(error)}"
        control.sendall(line("failed", reason))
        return
    zygote = _Zygote(control, make, Path(directory[0]) if directory else None)
    gc.collect()
    gc.freeze()  # a collection in an episode would copy the pages that it shares
    control.sendall(line("ready", len(os.listdir("/proc/self/task"))))
    zygote.run()


@dataclass(frozen=True)
class _Child:
    """The process of an episode, or a spare one."""

    pid: int
    connection: socket.socket
    """An episode's end of the connection to its owner, held here too. Our end of the one to a spare."""


class _Zygote:
    def __init__(
        self, control: socket.socket, make: Callable[[], Environment], directory: Path | None
    ) -> None:
        self._control, self._make, self._directory = control, make, directory
        self._episodes: dict[int, _Child] = {}
        self._spares: dict[int, _Child] = {}
        self._most = 0
        """Episodes that there were at one time, since a spare last died or could not be forked."""
        self._helpers = _children()
        """Processes that the environment's module has started when it was imported."""
        adopt_orphans()  # of episodes that have ended
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the signal wakes `run`
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def run(self) -> None:
        """Fork and end episodes until the owner is gone."""
        while True:
            by_socket = {child.connection.fileno(): child for child in self._episodes.values()}
            lacks_spares = len(self._episodes) + len(self._spares) < self._most
            ready = self._poll.poll(0 if lacks_spares else None)
            if not ready:
                self._fork_spare()
            for descriptor, _ in ready:
                if descriptor == self._control.fileno():
                    _, received, _, _ = socket.recv_fds(self._control, 1, 1, socket.MSG_CMSG_CLOEXEC)
                    if not received:
                        return
                    self._begin(socket.socket(fileno=received[0]))
                elif descriptor == self._wake:
                    os.read(self._wake, _CHUNK)
                    self._reap()
                elif (child := by_socket.get(descriptor)) is not None and child.pid in self._episodes:
                    self._poll.unregister(descriptor)
                    os.kill(child.pid, signal.SIGKILL)

    def _begin(self, connection: socket.socket) -> None:
        try:
            pid = self._handed_over(connection) or self._fork(lambda: connection)
        except OSError as error:  # too many processes, or no memory
            _close(connection, f"it cannot be forked: {error}")
            return
        self._episodes[pid] = _Child(pid, connection)
        self._most = max(self._most, len(self._episodes))
        self._poll.register(connection, select.POLLRDHUP)

    def _handed_over(self, connection: socket.socket) -> int | None:
        """Return the process id of the spare that takes the connection; None if no spare is alive."""
        for pid, spare in self._spares.items():
            with suppress(OSError):  # it was killed, and `_reap` will collect it
                socket.send_fds(spare.connection, [b"+"], [connection.fileno()])
                del self._spares[pid]
                spare.connection.close()
                return pid
        return None

    def _fork_spare(self) -> None:
        ours, theirs = socket.socketpair()

        def received() -> socket.socket:
            with ours, theirs:
                _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1, socket.MSG_CMSG_CLOEXEC)
            return socket.socket(fileno=descriptor)

        with theirs:
            try:
                pid = self._fork(received)
            except OSError:  # the next order to fork fails as well, and says so
                self._most = 0
                ours.close()
            else:
                self._spares[pid] = _Child(pid, ours)

    def _fork(self, connection: Callable[[], socket.socket]) -> int:
        """Return the process id of a new process, in which `connection` is called for the connection on
        which it serves an episode."""
        own_pid = os.getpid()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                self._become_episode(own_pid)
                _serve(connection(), self._make)
                status = 0
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                os._exit(status)  # without what the zygote would do at its exit
        return pid

    def _become_episode(self, zygote: int) -> None:
        die_with(zygote)
        adopt_orphans()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for end in (self._wake, self._woken):
            os.close(end)
        for child in [*self._episodes.values(), *self._spares.values()]:
            child.connection.close()
        if self._directory is not None:
            own_directory = self._directory / str(os.getpid())
            own_directory.mkdir()
            os.environ["TMPDIR"] = tempfile.tempdir = str(own_directory)

    def _reap(self) -> None:
        """Collect the children that have ended, and end what is left of their episodes."""
        ended_children = []
        with suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = reaped
                if pid in self._spares:  # the next would die as well, without end, where none can live
                    self._most = 0
                if (child := self._episodes.pop(pid, None) or self._spares.pop(pid, None)) is not None:
                    ended_children.append((child, status))
        for stranger in _children() - self._helpers - self._episodes.keys() - self._spares.keys():
            with suppress(ProcessLookupError):  # its end is the next signal, and its children are seen then
                os.kill(stranger, signal.SIGKILL)
        for child, status in ended_children:
            with suppress(KeyError):
                self._poll.unregister(child.connection)
            code = os.waitstatus_to_exitcode(status)
            _close(child.connection, f"status {code}" if code >= 0 else signal.Signals(-code).name)
            if self._directory is not None:
                shutil.rmtree(self._directory / str(child.pid), ignore_errors=True)


def _close(connection: socket.socket, reason: str) -> None:
    """Send the reason to the episode's owner, and close the connection."""
    with connection, suppress(OSError):  # the owner is gone, or reads nothing
        connection.send(DEATH + reason.encode() + b"\n", socket.MSG_DONTWAIT)


def _children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def _serve(connection: socket.socket, make: Callable[[], Environment]) -> None:
    """Answer an episode's owner by an environment's methods, until it is closed or the owner is gone."""
    own_pid = os.getpid()
    episode = _Episode(make)
    for received in connection.makefile("rb"):
        method, arguments = json.loads(received)
        answer = _answer(getattr(episode, method), arguments)
        if os.getpid() != own_pid:  # the environment forked, and both returned: one answers
            return
        connection.sendall(answer)
        if method == "close":
            return


class _Episode:
    """The methods that the owner calls, with JSON as arguments and values."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environment: Any = None

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> dict[str, Any]:
        from megatron_ibpo.environments.frameworks import seed_generators  # `main` has imported it

        seed_generators(seed)
        self._environment = self._make()
        opening = self._environment.reset(question, label, metadata, seed)
        _check(opening, ("messages", "tools"), "reset", "Opening")
        return {"messages": list(opening.messages), "tools": list(opening.tools)}

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        turn = self._environment.step(message)
        _check(turn, ("messages", "done"), "step", "Turn")
        return {"messages": list(turn.messages), "done": bool(turn.done)}

    def score(self) -> dict[str, float]:
        """Return the score; rewards of single turns, `turns`, become the further numbers turn_1, turn_2 …."""
        try:
            value = self._environment.score()
        except ResponseError:
            value = WRONG
        if isinstance(value, Mapping) and "turns" in value and not isinstance(value["turns"], Real):
            value = dict(value)
            turns = value.pop("turns")
            if not isinstance(turns, list | tuple):
                raise TypeError(f"expected a list of numbers as 'turns', got {shown(turns)}")
            value |= {f"turn_{number}": reward for number, reward in enumerate(turns, start=1)}
        reward, details = read_reward(value)
        return {"score": reward, **details}

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


def _check(value: Any, fields: Sequence[str], method: str, name: str) -> None:
    if not all(hasattr(value, field) for field in fields):
        raise TypeError(f"{method} must return {name}({', '.join(fields)}), got {type(value).__name__}")


def _answer(method: Callable[..., Any], arguments: list[Any]) -> bytes:
    try:
        return line("answer", method(*arguments))
    except EpisodeFaultError as fault:  # an adapter knows more about it
        return line("fault", fault.kind, str(fault))
    except BaseException as error:
        return line("fault", "error", fault_text(error, os.path.dirname(__file__)))


if __name__ == "__main__":
    main()
