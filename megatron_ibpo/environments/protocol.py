"""The protocol of environments of many turns, which users write, and its plain records.

Messages are those of the OpenAI chat format: {"role": "user", "content": "…"}; a message of the policy may
have `tool_calls`, [{"id": "call_0", "type": "function", "function": {"name": …, "arguments": {…}}}], with the
arguments parsed. A tool's answer is {"role": "tool", "tool_call_id": …, "name": …, "content": "…"}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]
Tool = dict[str, Any]
"""A tool as {"name", "description", "parameters"}, the parameters as a JSON schema."""

FaultKind = Literal["death", "step_timeout", "episode_timeout", "wire", "error"]
"""Why an episode has no score: its process died; one call or the whole episode took too long; a server of
environments broke the connection; the environment raised an exception."""


@dataclass(frozen=True)
class Opening:
    """The start of an episode."""

    messages: Sequence[Message]
    """Messages before the policy's first turn; the last one is the user's."""
    tools: Sequence[Tool] = ()
    """Tools that the policy may call; the chat template shows them."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to one message of the policy."""

    messages: Sequence[Message] = ()
    """Messages to the policy: answers of tools, or the user's next message. Not read when `done`."""
    done: bool = False


class Environment(Protocol):
    """One episode, in a process of its own. Write a class with these four methods and name it by
    --environment package.module:Class; no base class is needed.

    A method may take as long as --step-timeout. One that raises, hangs or dies ends the episode, which is
    played once more and then has no reward: a fault is never a reward of 0."""

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Begin the episode.

        Args:
            question, label, metadata: of the prompt (docs/data.md).
            seed: the same for every episode of a prompt in one step, so that they all start alike.
        """
        ...

    def step(self, message: Message) -> Turn:
        """Answer a message of the policy."""
        ...

    def score(self) -> float | Mapping[str, Any]:
        """Return the episode's reward, as a reward function does: a number, or a mapping with the number as
        `score` and further numbers. `turns` may be a list of rewards, one for each turn of the policy, for
        estimators that use them: they find them as turn_1, turn_2, … among `Sample.reward_details`.

        Called once, at the end: after the last turn, or when turns or tokens are used up.
        """
        ...

    def close(self) -> None:
        """Release what the episode holds."""
        ...


class EpisodeFaultError(Exception):
    """An episode that cannot continue, through no fault of the policy."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(text)
        self.kind: FaultKind = kind


@dataclass(frozen=True)
class EpisodeScore:
    """The score of an episode, as `Environment.score` returned it."""

    reward: float
    details: dict[str, float] = field(default_factory=dict)


class Session(Protocol):
    """One running episode, as the turn loop drives it. Every method raises EpisodeFaultError when the
    environment cannot answer; after that only `close` may be called."""

    @property
    def opening(self) -> Opening: ...

    async def step(self, message: Message) -> Turn: ...

    async def score(self) -> EpisodeScore: ...

    async def close(self) -> None:
        """End the episode and its process. Never raises, and may be called at any time and more than once."""
        ...


class Sessions(Protocol):
    """A place where episodes run."""

    async def open(
        self, target: str, question: str, label: str, metadata: Mapping[str, Any], seed: int
    ) -> Session:
        """Start an environment, named as by --environment, and reset it. Raises EpisodeFaultError if it does
        not start."""
        ...


class Chat(Protocol):
    """Writer and reader of turns as token ids in a model's chat format. What is written is only ever
    extended: no id of an earlier turn changes."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of the messages with the start of the policy's turn."""
        ...

    def read(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> Message:
        """Return the message of the policy's turn, without its end-of-sequence id or with it. A call that
        cannot be parsed stays in the content, and its text is listed under "malformed_tool_calls"; reasoning
        is under "reasoning_content". The tools are those of the episode, whose schemas tell the text "12"
        from the number; None: not known."""
        ...

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the ids to append to `ids` (a conversation that ends in the policy's turn) so that it goes
        on with these messages and the start of the policy's next turn. Raises ValueError if the turn was cut,
        before its end-of-sequence id, or the tokenizer or the template cannot express the messages."""
        ...
