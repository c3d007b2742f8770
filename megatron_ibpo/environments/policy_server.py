"""A server of chat completions, in an episode's process, whose model is the policy of the run.

It answers one request at a time: `next` returns what is asked, and `reply` gives the policy's message. Only
the messages and tools of a request are read; sampling is the run's affair."""

import asyncio
import json
import queue
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ibpo.environments.protocol import Message, Tool

_LARGEST_REQUEST = 64 << 20
"""Bytes of a request."""


@dataclass(frozen=True)
class Request:
    """A request for the policy's next message."""

    messages: list[Message]
    """The whole conversation, contents as text."""
    tools: list[Tool]


@dataclass(frozen=True)
class Ended:
    """The end of what was run."""

    value: Any
    """What it returned; None if it failed."""
    error: BaseException | None = None


class PolicyServer:
    """Runs something that asks a model over HTTP, one request after the other."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Request | Ended] = queue.SimpleQueue()
        # of the server's loop: a thread that waited for a reply would outlive an episode that is left
        self._replies: asyncio.Queue[Message] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def next(self) -> Request | Ended:
        """Wait for the next request, or the end."""
        return self._requests.get()

    def reply(self, message: Message) -> None:
        """Answer the last request."""
        assert self._loop is not None  # `next` gave a request
        self._loop.call_soon_threadsafe(self._replies.put_nowait, message)

    async def run(self, play: Callable[[str, Any], Awaitable[Any]], argument: Any) -> None:
        """Serve on a port of this machine, and run `play(base_url, argument)`."""
        from aiohttp import web  # others need no server

        self._loop = asyncio.get_running_loop()
        application = web.Application(client_max_size=_LARGEST_REQUEST)
        application.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(application)
        try:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self._requests.put(Ended(await play(f"http://127.0.0.1:{port}/v1", argument)))
        except BaseException as error:  # the turn loop waits for an end
            self._requests.put(Ended(None, error))
        finally:
            await runner.cleanup()

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        tools = [tool["function"] for tool in body.get("tools") or () if tool.get("type") == "function"]
        self._requests.put(Request([_as_text(message) for message in body["messages"]], tools))
        message = await self._replies.get()
        if not body.get("stream"):
            return web.json_response(_completion(message))
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(message)]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")


def _as_text(message: Mapping[str, Any]) -> Message:
    """Return a message with its content as text and the arguments of its calls parsed.

    Raises:
        ValueError: it has content other than text.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has content other than text")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def _message(message: Message) -> dict[str, Any]:
    """Return the policy's message as the API writes it: arguments of calls are text."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    answer = {"role": "assistant", "content": message.get("content") or ""}
    return {**answer, "tool_calls": calls} if calls else answer


def _completion(message: Message) -> dict[str, Any]:
    answer = _message(message)
    choice = {"index": 0, "message": answer, "finish_reason": _finish(answer)}
    return _frame("chat.completion", [choice])


def _chunks(message: Message) -> list[dict[str, Any]]:
    answer = _message(message)
    for number, call in enumerate(answer.get("tool_calls", ())):
        call["index"] = number
    first = {"index": 0, "delta": answer, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": _finish(answer)}
    return [_frame("chat.completion.chunk", [choice]) for choice in (first, last)]


def _finish(answer: Mapping[str, Any]) -> str:
    return "tool_calls" if "tool_calls" in answer else "stop"


def _frame(kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": "policy", "object": kind, "created": int(time.time()), "model": "policy"}
    return {**head, "choices": choices, "usage": usage}
