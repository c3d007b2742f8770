"""The episodes of one node, each in a process of its own that can be killed at any time.

--environment-sandbox puts bubblewrap around an environment's zygote, and so around its episodes. It gives
more than `rewards.sandbox`, since an environment is code that the user chose."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.supervised import Supervised
from megatron_ibpo.config import ConfigError, EnvironmentConfig, user_directory
from megatron_ibpo.environments.protocol import EpisodeFaultError, FaultKind
from megatron_ibpo.environments.session import ProcessSession
from megatron_ibpo.rewards.sandbox import SandboxError
from megatron_ibpo.rewards.sandbox.bubblewrap import bubblewrap

_START_TIMEOUT = 120.0
"""Seconds that the import of an environment may take."""
_STARTS = 3
"""Starts of a zygote. It may be killed while it imports, as one before it was; not endlessly."""
_FORK_TIMEOUT = 30.0
"""Seconds in which a zygote must have taken an order to fork."""
_FULL_WAIT = 0.01
"""Seconds until the next try when more episodes start at once than a socket holds."""
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS)
_PRINTED_BYTES = 64 << 10
"""Bytes that the episodes of an environment may print together. After the n-th start of its zygote it is an
n-th of it."""
_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # hundreds of episodes share the processors, and a fork copies no threads
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # an episode that is played again starts alike
}

_log = logging.getLogger(__name__)


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """The processes of episodes on this machine (`protocol.Sessions`). One process per environment, the
    zygote, imports it, and every episode is a fork of that. At most --environment-processes episodes are open
    at one time; others wait for their turn. Episodes may belong to several event loops."""

    def __init__(self, config: EnvironmentConfig):
        self._config = config
        self.faults: Counter[FaultKind] = Counter()
        self.opened = 0
        """Number of EpisodeFaultErrors raised, by kind, and of episodes begun."""
        self._zygote_deaths = 0
        self._lock = threading.Lock()
        self._places = _Places(config.environment_processes)
        self._zygotes: dict[str, _Zygote] = {}
        """The last zygote of each environment, by its import path."""
        self._starts: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self._starter = ThreadPoolExecutor(1, "environments")
        """The thread that starts zygotes. The kernel kills them when it ends."""
        self._closed = False

    @property
    def deaths(self) -> int:
        """Processes that died by themselves or were killed from outside: of episodes, and zygotes."""
        return self.faults["death"] + self._zygote_deaths

    @property
    def open_now(self) -> int:
        """Episodes that are open, or wait for their turn."""
        return self._places.asked

    def check(self, target: str) -> None:
        """Import an environment in its process, or try its server, before work starts. Raises ConfigError
        with the reason in one line if either fails, or there is no sandbox."""
        if "://" in target:
            from megatron_ibpo.environments.openenv import check_server  # others need no websockets

            check_server(target, self._config.step_timeout)
        self._starter.submit(self._alive, target).result()

    async def open(
        self, target: str, question: str, label: str, metadata: Mapping[str, Any], seed: int
    ) -> ProcessSession:
        """Begin an episode in a process of its own. See `protocol.Sessions`."""
        await self._places.take()
        try:
            zygote, connection = await self._forked(target)
        except BaseException:
            self._places.give_back()
            raise

        def give_back_place(hangs: bool) -> None:
            if hangs:
                zygote.process.kill()
            self._places.give_back()

        timeouts = self._config.step_timeout, self._config.episode_timeout
        fault = partial(self._fault, target)
        session = ProcessSession(connection, *timeouts, fault, give_back_place)
        try:
            await session.reset(question, label, metadata, seed)
        except BaseException:
            await session.close()
            raise
        return session

    def close(self) -> None:
        self._closed = True
        for zygote in list(self._zygotes.values()):
            zygote.process.kill()  # a start that is under way fails
        with suppress(RuntimeError):  # it was closed before
            self._starter.submit(self._end_zygotes)
        self._starter.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fault(self, target: str, kind: FaultKind, text: str) -> EpisodeFaultError:
        """Count a fault, and return its exception."""
        with self._lock:
            self.faults[kind] += 1
            count = self.faults[kind]
        if count.bit_count() == 1:
            _log.warning("environment %s: %s (%s %d)", target, text, kind.replace("_", "-"), count)
        return EpisodeFaultError(kind, text)

    async def _forked(self, target: str) -> tuple[_Zygote, socket.socket]:
        """Return a zygote of the environment, and the connection to the process that it has forked."""
        with self._lock:
            self.opened += 1
        for _ in range(_STARTS):
            zygote = self._zygotes.get(target)
            try:
                if zygote is None or not zygote.is_ready():
                    zygote = await asyncio.wrap_future(self._starter.submit(self._alive, target))
            except _NotStartedError as error:
                raise self._fault(target, "death", str(error)) from None
            except (ConfigError, RuntimeError) as error:  # RuntimeError: the pool is closed
                raise self._fault(target, "error", str(error)) from None
            try:
                return zygote, await zygote.fork()
            except OSError as error:  # it has died just now
                died = error
        raise self._fault(target, "death", f"no process can be forked: {died}")

    def _alive(self, target: str) -> _Zygote:
        """Return the zygote of an environment, started if it has died. Runs in the thread of starts."""
        zygote = self._zygotes.get(target)
        if zygote is not None and zygote.is_ready():
            return zygote
        if zygote is not None:
            self._bury(zygote)
        if target in self._refused:
            raise ConfigError(self._refused[target])
        for _ in range(_STARTS - 1):
            with suppress(_NotStartedError):
                return self._started(target)
        return self._started(target)

    def _started(self, target: str) -> _Zygote:
        if self._config.environment_sandbox and "://" in target:
            raise ConfigError(
                f"--environment-sandbox: the sandbox has no network, which {target} needs; leave the flag out"
            )
        self._starts[target] += 1
        printed = _PRINTED_BYTES // self._starts[target]
        try:
            zygote = _Zygote(target, self._config, printed)
        except SandboxError as error:
            raise ConfigError(f"--environment-sandbox: {error}") from None
        self._zygotes[target] = zygote
        if self._closed:
            zygote.process.kill()
        try:
            zygote.await_ready()
        except _NotStartedError:
            if self._closed:
                raise ConfigError(f"environment {target}: its processes have been closed") from None
            self._bury(zygote)
            raise
        except ConfigError as error:
            self._refused[target] = str(error)
            zygote.end()
            del self._zygotes[target]
            raise
        return zygote

    def _end_zygotes(self) -> None:
        for zygote in self._zygotes.values():
            zygote.end()

    def _bury(self, zygote: _Zygote) -> None:
        """End a zygote that has died, and count it once."""
        zygote.end()
        if self._zygotes.pop(zygote.target, None) is zygote and not self._closed:
            self._zygote_deaths += 1
            if self._zygote_deaths.bit_count() == 1:
                death = f"({zygote.process.exit_reason()}, death {self._zygote_deaths})"
                _log.warning("environment %s: its process that forks episodes died %s", zygote.target, death)


class _NotStartedError(ConfigError):
    """The zygote ended while it imported the environment, or never finished; the next one may."""


class _Zygote:
    """The process that imports an environment and forks its episodes, as its owner sees it."""

    def __init__(self, target: str, config: EnvironmentConfig, printed: int):
        """Start it; it and its episodes may print so many bytes. Raises SandboxError if bubblewrap is not
        installed."""
        self.target = target
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "megatron_ibpo.environments.zygote", str(theirs.fileno())]
        in_sandbox, rewards = config.environment_sandbox, json.dumps(config.environment_reward)
        command += [OWNER, target, rewards, TEMPORARY] if in_sandbox else ["{owner}", target, rewards]
        with theirs:
            self.process = Supervised(  # killed with all episodes
                sandboxed(command) if in_sandbox else command,
                theirs,
                printed=printed,
                name=f"environment {target}",
                environment=_SETTINGS,
            )
        self._control = ours
        self._ready = False

    def await_ready(self) -> None:
        """Wait until it has imported the environment. Raises ConfigError if it cannot be imported."""
        self._control.settimeout(_START_TIMEOUT)
        with self._control.makefile("rb") as file:
            try:
                line, hangs = file.readline(), False
            except TimeoutError:
                line, hangs = b"", True
        if not line:
            self.end()
            ended = (
                f"its process ended while importing it ({self.process.exit_reason()}); see the lines above"
            )
            problem = f"not imported within {_START_TIMEOUT:.0f} s" if hangs else ended
            raise _NotStartedError(f"--environment {self.target}: {problem}")
        state, content = read_json(line)
        if state != "ready":
            raise ConfigError(content)
        if content > 1:
            threads = "threads, and episodes, which are forks, do not have them"
            _log.warning("environment %s: its import started %d %s", self.target, content - 1, threads)
        self._control.setblocking(False)
        self._ready = True

    def is_ready(self) -> bool:
        if not self._ready:
            return False
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))  # it never writes more: this is the end
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def fork(self) -> socket.socket:
        """Have it fork a process; return the connection to that. Raises OSError if it has died, or hangs and
        is killed."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                async with asyncio.timeout(_FORK_TIMEOUT):
                    while not self._sent(theirs):
                        await asyncio.sleep(_FULL_WAIT)
            except BaseException as error:
                ours.close()
                if isinstance(error, TimeoutError):
                    self.process.kill()
                raise
        ours.setblocking(False)
        return ours

    def _sent(self, theirs: socket.socket) -> bool:
        try:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        return True

    def end(self) -> None:
        """Kill it with all episodes, and wait until they have ended."""
        self._ready = False
        self.process.end()
        self._control.close()


class _Places:
    """A limit of what runs at once: first come, first served, across event loops."""

    def __init__(self, count: int):
        self.asked = 0
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    async def take(self) -> None:
        with self._lock:
            self.asked += 1
            if self._free:
                self._free -= 1
                return
            place: Future[None] = Future()
            self._waiting.append(place)
        try:
            await asyncio.wrap_future(place)
        except asyncio.CancelledError:
            if place.cancel():
                with self._lock:
                    self.asked -= 1
            else:  # it was given at the same moment
                self.give_back()
            raise

    def give_back(self) -> None:
        with self._lock:
            self.asked -= 1
            while self._waiting:
                place = self._waiting.popleft()
                if place.set_running_or_notify_cancel():
                    place.set_result(None)
                    return
            self._free += 1


TEMPORARY = "/tmp"
"""Temporary directory inside, in memory."""
OWNER = "1"
"""Process id, inside, of the parent of the command."""
_HIDDEN = (TEMPORARY, "/var/tmp", "/run")
"""Directories that hold sockets of other programs, which a read-only file system does not keep from use."""


def sandboxed(command: list[str]) -> list[str]:
    """Return the command that runs another one in the sandbox: without network and other processes, and with
    a file system that is read-only except for an empty temporary directory. Raises SandboxError if bubblewrap
    is not installed."""
    wrapped = [bubblewrap(), "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    wrapped += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path in filter(os.path.isdir, _HIDDEN):
        wrapped += ["--tmpfs", path]
    for path in _needed():
        wrapped += ["--ro-bind", path, path]
    return [*wrapped, "--setenv", "TMPDIR", TEMPORARY, "--", *command]


def _needed() -> list[str]:
    """Return the hidden directories from which Python imports."""
    directories = {os.path.abspath(path) for path in [sys.prefix, str(user_directory()), *sys.path]}
    hidden = [path for path in sorted(directories) if any(map(Path(path).is_relative_to, _HIDDEN))]
    return [path for path in hidden if os.path.exists(path) and path not in _HIDDEN]
