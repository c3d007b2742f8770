"""Environments of the `verifiers` package (0.4, `verifiers.v1`) behind our protocol. There the environment
runs the episode, and asks a server with the API of OpenAI for the policy's messages. Here the episode runs in
a thread, and `PolicyServer` turns each request into a turn, so every harness works that keeps its
conversation as it is."""

import asyncio
import json
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_ibpo.environments.protocol import EpisodeFaultError, Message, Opening, Tool, Turn

_LARGEST_REQUEST = 64 << 20


@dataclass(frozen=True)
class Request:
    """A request for the policy's next message, with the whole conversation, contents as text."""

    messages: list[Message]
    tools: list[Tool]


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of an episode, with what it returned or why it failed."""

    value: Any
    error: BaseException | None = None


class PolicyServer:
    """A server of the policy for code that asks a model over HTTP, one request after the other."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Request | EpisodeEnd] = queue.SimpleQueue()
        # of the server's loop: a thread that waited for a reply would outlive an episode that is left
        self._replies: asyncio.Queue[Message] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def next(self) -> Request | EpisodeEnd:
        """Wait for the next request, or the end."""
        return self._requests.get()

    def reply(self, message: Message) -> None:
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
            self._requests.put(EpisodeEnd(await play(f"http://127.0.0.1:{port}/v1", argument)))
        except BaseException as error:  # the turn loop waits for an end
            self._requests.put(EpisodeEnd(None, error))
        finally:
            await runner.cleanup()

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        tools = [tool["function"] for tool in body.get("tools") or () if tool.get("type") == "function"]
        self._requests.put(Request([_as_text(message) for message in body["messages"]], tools))
        answer = _message(await self._replies.get())
        reason = "tool_calls" if "tool_calls" in answer else "stop"
        if not body.get("stream"):
            return web.json_response(_frame("chat.completion", message=answer, finish_reason=reason))
        for number, call in enumerate(answer.get("tool_calls", ())):
            call["index"] = number
        kind = "chat.completion.chunk"
        chunks = _frame(kind, delta=answer, finish_reason=None), _frame(kind, delta={}, finish_reason=reason)
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")


def _as_text(message: Mapping[str, Any]) -> Message:
    """Return a message with its content as text and the arguments of its calls parsed."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has content other than text")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def _message(message: Message) -> dict[str, Any]:
    """Return the policy's message as the API writes it: arguments of calls are text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": json.dumps(function["arguments"])}})
    answer = {"role": "assistant", "content": message.get("content") or ""}
    return {**answer, "tool_calls": calls} if calls else answer


def _frame(kind: str, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": "policy", "object": kind, "created": int(time.time()), "model": "policy"}
    return {**head, "choices": [{"index": 0, **choice}], "usage": usage}


TASK_INDEX = "task_index"
"""Key in a row's metadata for the number of its task in the taskset."""
_INFINITE_TASKS = 256
"""Number of tasks of an endless taskset among which the seed chooses."""
_MOST_EMPTY_REPLIES = 64
"""Empty messages after which an episode without turns or tokens left must have ended."""


def is_verifiers(environment: Any) -> bool:
    """Return whether this is an environment of verifiers: `vf.load_environment(...)` returns one."""
    return all(callable(getattr(environment, name, None)) for name in ("run_episode", "serving"))


class VerifiersEnvironment:
    """An environment of verifiers with one agent that is trained. The row's `task_index`, or the seed,
    chooses the task. The score is the trace's reward; its rewards and metrics are kept by name. An episode
    whose turns or tokens are used up gets empty messages of the policy until it ends, and is scored then."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._server = PolicyServer()
        self._messages: list[Message] = []
        """The conversation so far, as the last request had it."""
        self._ended: EpisodeEnd | None = None

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Start the task's episode, and return its first request to the policy. The prompt's question, if
        there is any, stands before the task's last message."""
        task = self._task(metadata.get(TASK_INDEX), seed)
        threading.Thread(target=asyncio.run, args=(self._server.run(self._play, task),), daemon=True).start()
        request = self._next()
        if isinstance(request, EpisodeEnd):
            raise self._fault("it ended before the policy was asked")
        messages = [dict(message) for message in request.messages]
        if question:
            messages[-1]["content"] = f"{question}\n\n{messages[-1]['content']}"
        return Opening(messages, request.tools)

    def step(self, message: Message) -> Turn:
        """Give the policy's message to the episode, and return what its next request adds."""
        previous_messages, num_messages = self._messages, len(self._messages)
        self._server.reply(message)
        request = self._next()
        if isinstance(request, EpisodeEnd):
            return Turn(done=True)
        if request.messages[:num_messages] != previous_messages or len(request.messages) <= num_messages + 1:
            raise EpisodeFaultError(
                "error",
                "the episode does not continue the policy's conversation: its harness rewrote the context, "
                "or several agents ask the policy",
            )
        return Turn(request.messages[num_messages + 1 :])

    def score(self) -> dict[str, float]:
        """Return the trace's reward, and its rewards and metrics by name."""
        for _ in range(_MOST_EMPTY_REPLIES):
            if self._ended is not None:
                break
            self._server.reply({"role": "assistant", "content": ""})
            self._next()
        if self._ended is None:
            raise self._fault(f"it has not ended after {_MOST_EMPTY_REPLIES} empty messages")
        episode = self._ended.value
        if episode is None or not episode.ok:
            raise self._fault("it failed")
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        if len(traces) != 1:
            raise self._fault(f"it has {len(traces)} traces of agents that are trained, and needs one")
        rewards = {name: reward.value for name, reward in traces[0].rewards.items() if reward is not None}
        metrics = {name: value for name, value in traces[0].metrics.items() if value is not None}
        return {**metrics, **rewards, "score": traces[0].reward}

    def close(self) -> None:
        """No-op: the process ends, and with it everything that the episode has started."""

    async def _play(self, url: str, task: Any) -> Any:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=url, api_key_var="MEGATRON_IBPO_NO_KEY")
        async with self._environment.serving():
            return await self._environment.run_episode(task, vf.ModelContext(model="policy", client=client))

    def _task(self, index: Any, seed: int) -> Any:
        taskset = self._environment.taskset
        if taskset.INFINITE:
            return next(islice(taskset, int(seed % _INFINITE_TASKS if index is None else index), None))
        tasks = list(taskset)
        return tasks[seed % len(tasks) if index is None else int(index)]

    def _next(self) -> Request | EpisodeEnd:
        request = self._server.next()
        if isinstance(request, EpisodeEnd):
            self._ended = request
        else:
            self._messages = request.messages
        return request

    def _fault(self, text: str) -> EpisodeFaultError:
        """Return the fault with the errors of the episode."""
        end = self._ended
        errors = [] if end is None or end.error is None else [repr(end.error)]
        if end is not None and end.value is not None:
            of_traces = [error for trace in end.value.traces for error in trace.errors]
            errors += [f"{error.type}: {error.message}" for error in [*end.value.errors, *of_traces]]
        return EpisodeFaultError("error", "; ".join([f"verifiers' episode: {text}", *errors]))
