"""Episodes: the turns of the policy and the answers of an environment, as one sample.

What was sampled is what is trained on. An episode's ids are the very ids that the engine wrote, with the
environment's answers between them as context; no text is ever turned into ids again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import (
    ExpertIds,
    Prompt,
    Sample,
    SampleRequest,
    TokenIds,
    no_expert,
    token_ids,
)
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import EnvironmentConfig
from megatron_ibpo.environments import Chat, EpisodeFaultError, EpisodeScore, Message, Session, Sessions

ENVIRONMENT = "environment"
"""Key of `Prompt.metadata` that names a prompt's environment."""
PLAYS = 2
"""Times that an episode is played before its reward is absent: a fault may be of the machine."""

AskTurn = Callable[[SampleRequest], Awaitable[Sample]]
"""Has an engine write one turn."""


def environment_of(prompt: Prompt) -> str | None:
    """Return the environment that a prompt names; None if its responses are of one turn."""
    named = prompt.metadata.get(ENVIRONMENT)
    return None if named is None else str(named)


@dataclass(eq=False)
class Episodes:
    """Plays the episodes of prompts that name an environment."""

    sessions: Sessions
    chat: Chat
    settings: EnvironmentConfig
    seed: int
    reward_threshold: float
    max_context: int | None
    """Limit of tokens in prompt and episode together."""
    framed: Callable[[list[Message]], list[Message]] = lambda messages: messages
    """Puts the run's system prompt before an opening."""
    faults: Counter[str] = field(default_factory=Counter)
    """Faults of environments by kind since the last `take_metrics`."""
    counts: Counter[str] = field(default_factory=Counter)

    async def play(self, prompt: Prompt, request: SampleRequest, ask: AskTurn, *, held_out: bool) -> Sample:
        """Return an episode with its reward.

        A fault of the environment, not of the policy, has the episode played once more with the same seeds;
        after another one the reward is absent, `reward_error` says why, and the sample has the turns so far.

        Args:
            request: its `max_tokens` limits the whole episode. A request for the prompt itself begins with
                the environment's opening; any other, such as a correction's, with its own ids.
            held_out: the prompt is one of evaluation. Its environment has other seeds than training's.

        Raises:
            ValueError: the opening leaves no room for a response, or the request continues a response.
        """
        if request.begun:
            raise ValueError(
                "an episode cannot continue the beginning of another, since its environment is in "
                "another state; use an operator that samples whole responses"
            )
        for play in range(1, PLAYS + 1):
            script = Transcript(request)
            try:
                return await self._played(prompt, script, ask, held_out)
            except EpisodeFaultError as fault:
                self.faults[fault.kind] += 1
                self.counts["replayed" if play < PLAYS else "unscored"] += 1
                why = f"{environment_of(prompt)}: {fault}"
        sample = script.sample(done=False)
        sample.reward_error = why
        return sample

    def take_metrics(self) -> dict[str, float]:
        """Return the faults by kind since the last call, and the episodes that were played again or have no
        reward for one."""
        metrics = {f"environment_faults/{kind}": float(number) for kind, number in self.faults.items()}
        metrics |= {f"episodes_{what}": float(number) for what, number in self.counts.items()}
        self.faults.clear()
        self.counts.clear()
        return metrics

    async def _played(self, prompt: Prompt, script: Transcript, ask: AskTurn, held_out: bool) -> Sample:
        target = environment_of(prompt)
        assert target is not None  # others are not episodes
        stream = ("held out",) if held_out else ()
        session = await self.sessions.open(
            target,
            prompt.text,
            prompt.label,
            prompt.metadata,
            derive_seed("environment", self.seed, prompt.index, *stream),
        )
        try:
            if np.array_equal(script.request.prompt_token_ids, prompt.token_ids):
                opening = session.opening
                messages = self.framed(list(opening.messages))
                script.open(_ids(self.chat.open, messages, opening.tools))
            done = await self._take_turns(script, session, ask)
            return self._scored(script.sample(done=done), script, await session.score())
        finally:
            await session.close()

    async def _take_turns(self, script: Transcript, session: Session, ask: AskTurn) -> bool:
        """Return whether the environment ended the episode; otherwise turns or tokens were used up."""
        for turn in range(self.settings.max_turns):
            room = self._room(script)
            if room <= 0 and turn == 0:
                raise ValueError(
                    f"the environment's opening of {len(script.prompt_ids)} tokens leaves no room for a turn "
                    f"in a context of {self.max_context} (--rollout-max-context-len)"
                )
            if room <= 0:
                break
            said = await ask(script.turn_request(turn, min(room, self.settings.max_turn_len or room)))
            script.say(said)
            if said.finish_reason == "length":
                break
            message = self.chat.read(said.token_ids.tolist(), session.opening.tools)
            script.count(message)
            answer = await session.step(message)
            if answer.done:
                return True
            if turn + 1 < self.settings.max_turns:
                answer_ids = _ids(self.chat.extend, script.all_ids.tolist(), answer.messages)
                if len(answer_ids) >= self._room(script):
                    break
                script.answer(answer_ids)
        return False

    def _room(self, script: Transcript) -> int:
        """Return the number of tokens that the episode may still have."""
        room = script.request.max_tokens - script.length
        if self.max_context is not None:
            room = min(room, self.max_context - len(script.prompt_ids) - script.length)
        return room

    def _scored(self, sample: Sample, script: Transcript, score: EpisodeScore) -> Sample:
        sample.reward, sample.correct = score.reward, score.reward >= self.reward_threshold
        sample.reward_details = score.details | {name: float(n) for name, n in script.counts.items()}
        return sample


class Transcript:
    """The tokens of an episode so far."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.prompt_ids = request.prompt_token_ids
        self.length = 0
        """Number of tokens after the prompt."""
        self.counts = Counter({"turns": 0, "tool_calls": 0, "malformed_calls": 0})
        self._parts: list[TokenIds] = []
        self._logprobs: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._versions: list[tuple[int, int]] = []
        self._routed: ExpertIds | None = None

    @property
    def all_ids(self) -> TokenIds:
        """Return the ids of prompt and episode."""
        return np.concatenate([self.prompt_ids, *self._parts])

    def open(self, ids: TokenIds) -> None:
        """Begin with these ids in place of the request's."""
        self.prompt_ids = ids

    def turn_request(self, turn: int, max_tokens: int) -> SampleRequest:
        """Return the request for the policy's next turn. Each turn has its own seed."""
        seed = self.request.seed if turn == 0 else derive_seed("turn", self.request.seed, turn)
        return replace(self.request, prompt_token_ids=self.all_ids, seed=seed, max_tokens=max_tokens)

    def say(self, turn: Sample) -> None:
        """Append a turn of the policy."""
        for first, version in turn.versions:
            if not self._versions or version != self._versions[-1][1]:
                self._versions.append((self.length + first if self._versions else 0, version))
        if turn.routed_experts is not None:
            self._routed = _joined(self._routed, turn.routed_experts)
        self.counts["turns"] += 1
        self._append(turn.token_ids, turn.logprobs, turn.loss_mask)

    def answer(self, ids: TokenIds) -> None:
        """Append the environment's answer, with the start of the policy's next turn."""
        self._append(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), bool))

    def count(self, message: Message) -> None:
        """Count the calls of tools in a message."""
        self.counts["tool_calls"] += len(message.get("tool_calls") or ())
        self.counts["malformed_calls"] += len(message.get("malformed_tool_calls") or ())

    def sample(self, *, done: bool) -> Sample:
        """Return the episode as a sample without a reward.

        Args:
            done: the environment ended it; otherwise it counts as truncated.
        """
        return Sample(
            prompt_token_ids=self.prompt_ids,
            token_ids=np.concatenate([token_ids([]), *self._parts]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            finish_reason="stop" if done else "length",
            temperature=self.request.temperature,
            versions=tuple(self._versions) or ((0, 0),),
            loss_mask=np.concatenate([np.zeros(0, bool), *self._mask]),
            routed_experts=self._routed,
        )

    def _append(self, ids: TokenIds, logprobs: np.ndarray, mask: np.ndarray) -> None:
        self._parts.append(ids)
        self._logprobs.append(logprobs)
        self._mask.append(mask)
        self.length += len(ids)


def _ids(write: Callable[..., Sequence[int]], *arguments: Any) -> TokenIds:
    """Return the ids of an environment's messages. Messages that tokenizer or template refuse are a fault of
    the environment, which need not end the run."""
    try:
        return token_ids(write(*arguments))
    except ValueError as error:
        raise EpisodeFaultError("error", f"its messages cannot be written: {error}") from None


def _joined(before: ExpertIds | None, now: ExpertIds) -> ExpertIds:
    """Return the record of a turn with that of earlier turns, whose tokens were sampled with those experts
    and may come from a cache now."""
    if before is None:
        return now
    joined = now.copy()
    joined[: len(before)] = np.where(before == no_expert(before), now[: len(before)], before)
    return joined


def as_opened(prompt: Prompt, responses: Sequence[Sample]) -> Prompt:
    """Return the prompt as the environment opened it for these responses, so that corrections begin like
    them. Other prompts are returned unchanged.

    Raises:
        ValueError: the opening does not end as the chat template begins the policy's turn.
    """
    if environment_of(prompt) is None:
        return prompt
    opened = next((r.prompt_token_ids for r in responses if len(r.token_ids)), prompt.token_ids)
    head = len(opened) - len(prompt.tail_ids)
    if not np.array_equal(opened[max(0, head) :], prompt.tail_ids):
        raise ValueError(
            f"{environment_of(prompt)}: its opening must end with a user message, after which the chat "
            "template begins the policy's turn; corrections would have no place otherwise"
        )
    return replace(prompt, token_ids=opened, head_length=head)
