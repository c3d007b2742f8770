"""A process that renders a chat template, which is a program of the model directory's author. Jinja's sandbox
keeps it from files and from Python, but not from nested loops or a text of a terabyte: so a fork of this
process runs it, which may take RENDER_S seconds and MOST_BYTES of memory for one text."""

import gc
import os
import pickle
import resource
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from megatron_ibpo.basics.text import error_text

RENDER_S = 10.0
"""Seconds for one text; usual ones take a tenth of a millisecond."""
MOST_BYTES = 1024**3
"""Memory that rendering may take."""
LONGEST_TEXT = 16 * 1024**2
"""Bytes of the messages and of the text: more than any context holds."""
_DONE, _REFUSED = b"+", b"-"


class TemplateError(ValueError):
    """A template that refuses the messages, or takes too much for them."""


class TemplateProcess:
    """The process of one template. It is forked at the first text, and again if it dies by itself; after a
    text that took too long none is rendered any more, so that this cannot delay every step of a run."""

    def __init__(self, render: Callable[..., str]) -> None:
        """Have texts rendered by a function, which is called in the process."""
        self._render = render
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._condemned: str | None = None

    def render(self, *arguments: Any) -> str:
        """Return the text for these arguments of `render`. Raises TemplateError if the template refuses them,
        or takes too much time, memory or text."""
        request = pickle.dumps(arguments)
        if len(request) > LONGEST_TEXT:
            raise TemplateError(
                f"the messages have {len(request):,} bytes, and {LONGEST_TEXT:,} are the limit"
            )
        with self._lock:
            if self._condemned is not None:
                raise TemplateError(self._condemned)
            for _ in range(2):  # it may have been killed, as for want of memory
                try:
                    if self._child is None or self._child.owner != os.getpid():
                        self._child = _Child(self._render)
                    return self._child.ask(request)
                except TemplateError:
                    raise
                except TimeoutError:
                    self._end()
                    self._condemned = f"it takes more than {RENDER_S:g} s"
                    raise TemplateError(self._condemned) from None
                except (EOFError, OSError) as error:
                    self._end()
                    died = error
                except BaseException:  # an interrupt: the answer would be taken for that of the next request
                    self._end()
                    raise
            raise TemplateError(f"its process cannot be started, or dies: {error_text(died)}")

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_render": self._render}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_render"])  # type: ignore[misc]


class _Child:
    """The process, and the connection to it."""

    def __init__(self, render: Callable[..., str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.owner, self._pid = os.getpid(), os.fork()
            if self._pid == 0:
                try:
                    _serve(theirs.fileno(), render)
                finally:
                    os._exit(0)
        self._connection = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, self.owner, self._pid, self._connection)
        """Kills the process and waits for its end."""

    def ask(self, request: bytes) -> str:
        """Return the text.

        Raises:
            TimeoutError: it takes too long.
            EOFError, OSError: the process has died.
            TemplateError: the template refuses the messages, or its text is too long.
        """
        self._connection.send_bytes(request)
        if not self._connection.poll(RENDER_S):
            raise TimeoutError
        answer = self._connection.recv_bytes(LONGEST_TEXT + 1)
        text = answer[1:].decode(errors="surrogatepass")
        if answer[:1] != _DONE:
            raise TemplateError(text)
        return text


def _end(owner: int, pid: int, connection: Connection) -> None:
    connection.close()
    if os.getpid() == owner:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(fd: int, render: Callable[..., str]) -> None:
    """Render until the owner is gone."""
    gc.disable()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal; the owner's handlers answer them
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, fd}:
        with suppress(OSError):  # that of the listing itself
            os.close(descriptor)
    with open("/proc/self/statm", encoding="utf-8") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + MOST_BYTES if hard == resource.RLIM_INFINITY else min(size + MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection = Connection(fd)
    with suppress(EOFError, OSError):
        while True:
            request = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_REAL, 2 * RENDER_S)  # ends it even if its owner has died
            answer = _answer(render, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(answer)


def _answer(render: Callable[..., str], request: bytes) -> bytes:
    try:
        text = render(*pickle.loads(request)).encode(errors="surrogatepass")
        if len(text) > LONGEST_TEXT:
            return _REFUSED + f"its text has {len(text):,} bytes, and {LONGEST_TEXT:,} are the limit".encode()
        return _DONE + text
    except MemoryError:
        return _REFUSED + f"it takes more than {MOST_BYTES // 1024**2:,} MiB of memory".encode()
    except Exception as error:
        return _REFUSED + error_text(error).encode(errors="replace")
