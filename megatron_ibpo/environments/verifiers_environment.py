"""Environments of the `verifiers` package (0.4, `verifiers.v1`) behind our protocol.

There the environment runs the episode, and asks for the policy's messages from a server with the API of
OpenAI. Here the episode runs in a thread, and that server (`PolicyServer`) turns each request into a turn: it
waits until the turn loop has the policy's message. So every harness works that keeps its conversation as it
is."""

import asyncio
import threading
from collections.abc import Mapping
from itertools import islice
from typing import Any

from megatron_ibpo.environments.policy_server import Ended, PolicyServer, Request
from megatron_ibpo.environments.protocol import EpisodeFaultError, Message, Opening, Turn

TASK_INDEX = "task_index"
"""Key of a row's metadata: which of the taskset's tasks it is."""
_INFINITE_TASKS = 256
"""Tasks that are played of a taskset without an end, by the seed."""
_MOST_EMPTY_REPLIES = 64
"""Empty messages after which an episode without turns or tokens left must have ended."""


def is_verifiers(environment: Any) -> bool:
    """Return whether this is an environment of verifiers: `vf.load_environment(...)` returns one."""
    return all(callable(getattr(environment, name, None)) for name in ("run_episode", "serving"))


class VerifiersEnvironment:
    """An environment of verifiers with one agent that is trained.

    The row's `task_index`, or the seed, chooses the task. The score is the trace's reward; its rewards and
    metrics are kept by name. An episode whose turns or tokens are used up gets empty messages of the policy
    until it ends, and is scored then."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._server = PolicyServer()
        self._messages: list[Message] = []
        """The conversation so far, as the last request had it."""
        self._ended: Ended | None = None

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Start the task's episode, and return its first request to the policy. The prompt's question, if
        there is any, stands before the task's last message."""
        task = self._task(metadata.get(TASK_INDEX), seed)
        threading.Thread(target=asyncio.run, args=(self._server.run(self._play, task),), daemon=True).start()
        request = self._next()
        if isinstance(request, Ended):
            raise self._fault("it ended before the policy was asked")
        messages = [dict(message) for message in request.messages]
        if question:
            messages[-1]["content"] = f"{question}\n\n{messages[-1]['content']}"
        return Opening(messages, request.tools)

    def step(self, message: Message) -> Turn:
        """Give the policy's message to the episode, and return what its next request adds."""
        num_messages = len(self._messages)
        before = self._messages
        self._server.reply(message)
        request = self._next()
        if isinstance(request, Ended):
            return Turn(done=True)
        if request.messages[:num_messages] != before or len(request.messages) <= num_messages + 1:
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
        """Nothing: the process ends, and all that the episode has started with it."""

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

    def _next(self) -> Request | Ended:
        request = self._server.next()
        if isinstance(request, Ended):
            self._ended = request
        else:
            self._messages = request.messages
        return request

    def _fault(self, text: str) -> EpisodeFaultError:
        """Return the fault with the errors of the episode."""
        ended = self._ended
        errors = [] if ended is None or ended.error is None else [repr(ended.error)]
        if ended is not None and ended.value is not None:
            of_traces = [error for trace in ended.value.traces for error in trace.errors]
            errors += [f"{error.type}: {error.message}" for error in [*ended.value.errors, *of_traces]]
        return EpisodeFaultError("error", "; ".join([f"verifiers' episode: {text}", *errors]))
