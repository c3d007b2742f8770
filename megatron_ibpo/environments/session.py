"""One episode in a process of its own, as its owner drives it, and the lines of JSON between the two.

The owner writes [method, [arguments]]. The process (`zygote`) answers ["answer", value] or ["fault", kind,
text]. It runs code of others, so its owner unpickles nothing and checks every answer. When the process has
died, the zygote ends its output with a NUL byte, which JSON never has, and the reason.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, get_args

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import shown
from megatron_ibpo.environments.protocol import (
    EpisodeFaultError,
    EpisodeScore,
    FaultKind,
    Message,
    Opening,
    Turn,
)

LARGEST_MESSAGE = 16 << 20
"""Bytes of one line. 16 MiB: far more than a conversation holds."""
DEATH = b"\0"
"""Mark before the reason why the process has died."""
_LONGEST_TEXT = 1000
"""Characters of a fault's text."""
_END_TIMEOUT = 60.0
"""Seconds until a zygote has ended an episode; one that takes longer hangs."""
_CHUNK = 1 << 16

T = TypeVar("T")


class ProcessSession:
    """A session (`protocol.Session`) whose process serves the other end of a socket that does not block.
    Shutting the socket down for writing is the order to kill the process; the end of what can be read says
    that it has ended, with all that it had started."""

    def __init__(
        self,
        connection: socket.socket,
        step_timeout: float,
        episode_timeout: float,
        fault: Callable[[FaultKind, str], EpisodeFaultError],
        give_back_place: Callable[[bool], None],
    ):
        """Serve one episode, whose calls together may take `episode_timeout` seconds. `fault` counts a fault
        and returns its exception; `give_back_place` gets True if the process could not be ended."""
        self._connection = connection
        self._step_timeout, self._episode_timeout = step_timeout, episode_timeout
        self._fault, self._give_back_place = fault, give_back_place
        self._received = bytearray()
        self._left = episode_timeout
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
        self._opening = await self._call(_opening_in, "reset", question, label, dict(metadata), seed)

    async def step(self, message: Message) -> Turn:
        return await self._call(_turn_in, "step", message)

    async def score(self) -> EpisodeScore:
        return EpisodeScore(*await self._call(read_reward, "score"))

    async def close(self) -> None:
        """See `protocol.Session`."""
        if self._closed:
            return
        self._closed = hangs = True
        try:
            if not self._ended and not self._exchanging.locked():
                with suppress(EpisodeFaultError, TimeoutError):
                    async with asyncio.timeout(self._step_timeout):
                        await self._exchange("close")
            self._end()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT), self._exchanging:  # a call under way ends with it
                    while await self._read():
                        pass
                hangs = False
        finally:
            self._connection.close()
            self._give_back_place(hangs)

    async def _call(self, value_in: Callable[[Any], T], method: str, *arguments: Any) -> T:
        """Return what a method of the environment returned, as `value_in` reads it."""
        if self._ended or self._closed:
            raise EpisodeFaultError("death", f"{method}: the episode is over")
        seconds = min(self._step_timeout, self._left)
        began = time.monotonic()
        kind: FaultKind
        try:
            async with asyncio.timeout(seconds):
                received = await self._exchange(method, *arguments)
            return value_in(_answer_in(received))
        except EpisodeFaultError as fault:
            kind, text = fault.kind, str(fault)
        except TimeoutError:
            kind, text = "step_timeout", f"no answer within {seconds:g} s"
            if seconds < self._step_timeout:
                kind, text = "episode_timeout", f"its calls took {self._episode_timeout:g} s in total"
        except (TypeError, ValueError) as error:
            kind, text = "error", str(error)
        except BaseException:  # the call is cancelled
            self._end()
            raise
        finally:
            self._left -= time.monotonic() - began
        self._end()
        raise self._fault(kind, f"{method}: {text}")

    async def _exchange(self, method: str, *arguments: Any) -> bytes:
        """Ask the process for a method's value; return the line that is the answer."""
        try:
            request = line(method, arguments)
        except (TypeError, ValueError) as error:
            raise EpisodeFaultError("error", f"its arguments cannot be sent: {error}") from None
        async with self._exchanging:
            with suppress(OSError):  # the process has died, and why can be read
                await asyncio.get_running_loop().sock_sendall(self._connection, request)
            searched = 0
            while (end := self._received.find(b"\n", searched)) < 0:
                searched = len(self._received)
                if searched > LARGEST_MESSAGE:
                    raise EpisodeFaultError("error", f"an answer of more than {LARGEST_MESSAGE:,} bytes")
                if not (read := await self._read()):
                    raise EpisodeFaultError("death", "its process died")
                self._received += read
            answer = bytes(self._received[:end])
            del self._received[: end + 1]
            return answer

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


def line(*parts: Any) -> bytes:
    """Return the line of a message. Raises TypeError or ValueError if a part is not JSON, or the line is too
    long."""
    try:
        text = json.dumps(parts, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("its brackets nest too deep") from None
    if len(text) >= LARGEST_MESSAGE:
        raise ValueError(f"{len(text):,} bytes, and at most {LARGEST_MESSAGE:,} can be sent")
    return text.encode() + b"\n"


def _answer_in(received: bytes) -> Any:
    """Return the value of an answer. Raises EpisodeFaultError for a fault, a death, or anything else."""
    _, died, exit_reason = received.rpartition(DEATH)
    if died:
        raise EpisodeFaultError("death", f"its process died ({exit_reason.decode(errors='replace').strip()})")
    try:
        answer = read_json(received)
    except ValueError as error:
        raise EpisodeFaultError("error", f"its process wrote an unreadable answer: {error}") from None
    match answer:
        case ["answer", value]:
            return value
        case ["fault", str(kind), str(text)] if kind in get_args(FaultKind):
            raise EpisodeFaultError(kind, text[:_LONGEST_TEXT])  # type: ignore[arg-type]
    raise EpisodeFaultError("error", f"its process wrote an unreadable answer: {shown(answer)}")


def _opening_in(value: Any) -> Opening:
    """Return the opening that a process sent; raise ValueError with what is wrong with it."""
    match value:
        case {"messages": [_, *_] as messages, "tools": list(tools)}:
            for tool in tools:
                match tool:
                    case {"name": str(), "parameters": {}}:
                        continue
                raise ValueError(f"a tool is {{name, description, parameters}}, got {shown(tool)}")
            return Opening(tuple(map(_message, messages)), tuple(tools))
    raise ValueError(f"an opening has at least one message, got {shown(value)}")


def _turn_in(value: Any) -> Turn:
    match value:
        case {"messages": list(messages), "done": bool(done)} if messages or done:
            return Turn(tuple(map(_message, messages)), done)
    raise ValueError(f"a turn that is not done has at least one message, got {shown(value)}")


def _message(value: Any) -> dict[str, Any]:
    match value:
        case {"role": str(), "content": str()} | {"role": "assistant", "tool_calls": [_, *_]}:
            return dict(value)
    raise ValueError(f"a message is {{role, content}} with the content as text, got {shown(value)}")
