"""One episode in a process of its own, as its owner drives it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from megatron_ibpo.environments import wire
from megatron_ibpo.environments.protocol import (
    EpisodeFaultError,
    EpisodeScore,
    FaultKind,
    Message,
    Opening,
    Turn,
)

_END_TIMEOUT = 60.0
"""Seconds until a zygote has ended an episode; one that takes longer hangs."""
_CHUNK = 1 << 16

T = TypeVar("T")


class Owner(Protocol):
    """The pool of a session."""

    @property
    def step_timeout(self) -> float: ...

    @property
    def episode_timeout(self) -> float: ...

    def fault(self, kind: FaultKind, text: str) -> EpisodeFaultError:
        """Count a fault, and return its exception."""
        ...

    def give_back_place(self, *, hangs: bool) -> None:
        """Take back the session's place.

        Args:
            hangs: its process could not be ended.
        """
        ...


class ProcessSession:
    """A session (`protocol.Session`) whose process serves the other end of a socket.

    Shutting the socket down for writing is the order to kill the process; the end of what can be read says
    that it has ended, with all that it had started.
    """

    def __init__(self, connection: socket.socket, owner: Owner):
        """
        Args:
            connection: not blocking.
        """
        self._connection, self._owner = connection, owner
        self._received = bytearray()
        self._left = owner.episode_timeout
        """Seconds that are left for calls of this episode."""
        self._exchanging = asyncio.Lock()
        self._ended = self._closed = False
        """Its process has been told to end, or it has ended; `close` was called."""
        self._opening: Opening | None = None

    @property
    def opening(self) -> Opening:
        assert self._opening is not None
        return self._opening

    async def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> None:
        """Make the environment and get the opening. The pool calls it once."""
        self._opening = await self._call(wire.opening_in, "reset", question, label, dict(metadata), seed)

    async def step(self, message: Message) -> Turn:
        return await self._call(wire.turn_in, "step", message)

    async def score(self) -> EpisodeScore:
        return await self._call(wire.score_in, "score")

    async def close(self) -> None:
        """See `protocol.Session`."""
        if self._closed:
            return
        self._closed = hangs = True
        try:
            if not self._ended and not self._exchanging.locked():
                with suppress(EpisodeFaultError, TimeoutError):
                    async with asyncio.timeout(self._owner.step_timeout):
                        await self._exchange(wire.request("close", []))
            self._end()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT), self._exchanging:  # a call under way ends with it
                    while await self._read():
                        pass
                hangs = False
        finally:
            self._connection.close()
            self._owner.give_back_place(hangs=hangs)

    async def _call(self, value_in: Callable[[Any], T], method: str, *arguments: Any) -> T:
        """Return what a method of the environment returned, as `value_in` reads it."""
        if self._ended or self._closed:
            raise EpisodeFaultError("death", f"{method}: the episode is over")
        seconds = min(self._owner.step_timeout, self._left)
        began = time.monotonic()
        kind: FaultKind
        try:
            async with asyncio.timeout(seconds):
                received = await self._exchange(wire.request(method, arguments))
            return value_in(wire.answer_in(received))
        except EpisodeFaultError as fault:
            kind, text = fault.kind, str(fault)
        except TimeoutError:
            kind, text = "step_timeout", f"no answer within {seconds:g} s"
            if seconds < self._owner.step_timeout:
                kind, text = "episode_timeout", f"its calls took {self._owner.episode_timeout:g} s in total"
        except (TypeError, ValueError) as error:
            kind, text = "error", str(error)
        except BaseException:  # the call is cancelled
            self._end()
            raise
        finally:
            self._left -= time.monotonic() - began
        self._end()
        raise self._owner.fault(kind, f"{method}: {text}")

    async def _exchange(self, request: bytes) -> bytes:
        """Send a request; return the line that is the answer."""
        async with self._exchanging:
            with suppress(OSError):  # the process has died, and why can be read
                await asyncio.get_running_loop().sock_sendall(self._connection, request)
            searched = 0
            while (end := self._received.find(b"\n", searched)) < 0:
                searched = len(self._received)
                if searched > wire.LARGEST_MESSAGE:
                    raise EpisodeFaultError("error", f"an answer of more than {wire.LARGEST_MESSAGE:,} bytes")
                if not (read := await self._read()):
                    raise EpisodeFaultError("death", "its process died")
                self._received += read
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            return line

    async def _read(self) -> bytes:
        """Return the next bytes; none at the end."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._connection, _CHUNK)
        except OSError:
            return b""

    def _end(self) -> None:
        self._ended = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
