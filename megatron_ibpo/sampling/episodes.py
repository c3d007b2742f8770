"""Episodes: the turns of the policy and the answers of an environment, as one sample. Its ids are the very
ids that the engine wrote, with the environment's answers between them as context; no text is ever turned into
ids again."""

from __future__ import annotations

import asyncio
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
from megatron_ibpo.basics.sampling_mask import SamplingMask, concatenated, unrestricted
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import ConfigError, EnvironmentConfig, environment_in
from megatron_ibpo.data.prompts import TooLongError, check_size
from megatron_ibpo.environments import Chat, EpisodeFaultError, Message, Session, Sessions, Tool

LONG_TURN = 2**14
"""Ids of a turn that is read in a thread: more take longer than a tenth of a second."""
PLAYS = 2
"""Times that an episode is played before its reward is absent: a fault may be of the machine."""

AskTurn = Callable[[SampleRequest], Awaitable[Sample]]


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
    counts: Counter[str] = field(default_factory=Counter)
    """Numbers since the last `take_metrics`: faults of environments by kind, and episodes that were played
    again or left without a reward because of a fault."""

    async def play(self, prompt: Prompt, request: SampleRequest, ask: AskTurn, *, held_out: bool) -> Sample:
        """Return an episode with its reward. A fault of the environment, not of the policy, has it played
        once more with the same seeds; after another one the reward is absent, `reward_error` says why, and
        the sample has the turns so far. Raises ValueError if the opening leaves no room for a response, or
        the request continues a response.

        Args:
            request: its `max_tokens` limits the whole episode. A request for the prompt itself begins with
                the environment's opening; any other, such as a correction's, with its own ids.
            held_out: the prompt is one of evaluation. Its environment has other seeds than training's.
        """
        if request.num_begun_tokens:
            raise ValueError(
                "an episode cannot continue the beginning of another, since its environment is in "
                "another state; use an operator that samples whole responses"
            )
        for play in range(1, PLAYS + 1):
            script = Transcript(request)
            try:
                return await self._played(prompt, script, ask, held_out)
            except EpisodeFaultError as fault:
                self.counts[f"environment_faults/{fault.kind}"] += 1
                self.counts["episodes_replayed" if play < PLAYS else "episodes_unscored"] += 1
                script.sample.reward_error = f"{prompt.environment}: {fault}"
        return script.sample

    def take_metrics(self) -> dict[str, float]:
        """Return the `counts` since the last call."""
        counts, self.counts = self.counts, Counter()
        return {name: float(number) for name, number in counts.items()}

    async def _played(self, prompt: Prompt, script: Transcript, ask: AskTurn, held_out: bool) -> Sample:
        try:
            target = environment_in(prompt.metadata, self.settings)
        except ConfigError as error:
            raise EpisodeFaultError("error", str(error)) from None
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
                if self._is_far_too_long(messages):
                    raise EpisodeFaultError("error", "its opening is far longer than the context")
                script.sample.prompt_token_ids = _ids(self.chat.open, messages, opening.tools)
            is_done = await self._take_turns(script, session, ask)
            score, sample = await session.score(), script.sample
            sample.finish_reason = "stop" if is_done else "length"
            sample.reward, sample.correct = score.reward, score.reward >= self.reward_threshold
            sample.reward_details = score.details | {name: float(n) for name, n in script.counts.items()}
            return sample
        finally:
            await session.close()

    async def _take_turns(self, script: Transcript, session: Session, ask: AskTurn) -> bool:
        """Return whether the environment ended the episode; otherwise turns or tokens were used up."""
        if self._room(script) <= 0:
            raise ValueError(
                f"the environment's opening of {len(script.all_ids)} tokens leaves no room for a turn "
                f"in a context of {self.max_context} (--rollout-max-context-len)"
            )
        for turn in range(self.settings.max_turns):
            room = self._room(script)
            sample = await ask(script.turn_request(turn, min(room, self.settings.max_turn_len or room)))
            script.say(sample)
            if sample.finish_reason == "length":
                break
            message = await self._read(sample.token_ids.tolist(), session.opening.tools)
            script.count(message)
            answer = await session.step(message)
            if answer.done:
                return True
            if turn + 1 < self.settings.max_turns:
                if self._is_far_too_long(answer.messages):
                    break
                answer_ids = _ids(self.chat.extend, script.all_ids.tolist(), answer.messages)
                if len(answer_ids) >= self._room(script):
                    break
                script.answer(answer_ids)
        return False

    async def _read(self, ids: list[int], tools: Sequence[Tool]) -> Message:
        """Return the message of a turn. A long one is read in a thread, so that other episodes go on."""
        if len(ids) <= LONG_TURN:
            return self.chat.read(ids, tools)
        return await asyncio.to_thread(self.chat.read, ids, tools)

    def _is_far_too_long(self, messages: Sequence[Message]) -> bool:
        """Return whether messages exceed the context whatever their tokens are, which a tokenizer could take
        minutes to find out."""
        try:
            check_size(sum(len(message.get("content") or "") for message in messages), self.max_context)
        except TooLongError:
            return True
        return False

    def _room(self, script: Transcript) -> int:
        """Return the number of tokens that the episode may still have."""
        room = script.request.max_tokens - len(script.sample.token_ids)
        return room if self.max_context is None else min(room, self.max_context - len(script.all_ids))


def unplayed(prompt: Prompt, request: SampleRequest) -> Sample:
    """Return a sample without turns and reward, for a prompt whose row names an environment while the run has
    none. The row was not among those checked at the start."""
    sample = Transcript(request).sample
    try:
        environment_in(prompt.metadata, EnvironmentConfig())
    except ConfigError as error:
        sample.reward_error = str(error)
    return sample


class Transcript:
    """An episode so far, as a sample without a reward."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.counts = Counter({"turns": 0, "tool_calls": 0, "malformed_calls": 0})
        self.sample = Sample(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids([]),
            logprobs=np.zeros(0, np.float32),
            finish_reason="length",
            temperature=request.temperature,
            versions=((0, 0),),
            loss_mask=np.zeros(0, bool),
        )

    @property
    def all_ids(self) -> TokenIds:
        """Return the ids of prompt and episode."""
        return np.concatenate([self.sample.prompt_token_ids, self.sample.token_ids])

    def turn_request(self, turn: int, max_tokens: int) -> SampleRequest:
        """Return the request for the policy's next turn. Each turn has its own seed."""
        seed = self.request.seed if turn == 0 else derive_seed("turn", self.request.seed, turn)
        return replace(self.request, prompt_token_ids=self.all_ids, seed=seed, max_tokens=max_tokens)

    def say(self, turn: Sample) -> None:
        """Append a turn of the policy."""
        sample, start = self.sample, len(self.sample.token_ids)
        spans = list(sample.versions) if self.counts["turns"] else []
        for first, version in turn.versions:
            if not spans or version != spans[-1][1]:
                spans.append((start + first, version))
        sample.versions = tuple(spans)
        sample.drafts = (sample.drafts[0] + turn.drafts[0], sample.drafts[1] + turn.drafts[1])
        if turn.routed_experts is not None:
            sample.routed_experts = _merge_choices(sample.routed_experts, turn.routed_experts)
        self.counts["turns"] += 1
        self._append(turn.token_ids, turn.logprobs, turn.loss_mask, turn.sampling_mask)

    def answer(self, ids: TokenIds) -> None:
        """Append the environment's answer, with the start of the policy's next turn."""
        self._append(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), bool), None)

    def count(self, message: Message) -> None:
        """Count the calls of tools in a message."""
        self.counts["tool_calls"] += len(message.get("tool_calls") or ())
        self.counts["malformed_calls"] += len(message.get("malformed_tool_calls") or ())

    def _append(
        self, ids: TokenIds, logprobs: np.ndarray, mask: np.ndarray, sampling_mask: SamplingMask | None
    ) -> None:
        sample, length = self.sample, len(self.sample.token_ids)
        if sample.sampling_mask is not None or sampling_mask is not None:
            earlier = unrestricted(length) if sample.sampling_mask is None else sample.sampling_mask
            added = unrestricted(len(ids)) if sampling_mask is None else sampling_mask
            sample.sampling_mask = concatenated([earlier, added])
        sample.token_ids = np.concatenate([sample.token_ids, ids])
        sample.logprobs = np.concatenate([sample.logprobs, logprobs])
        sample.loss_mask = np.concatenate([sample.loss_mask, mask])


def _ids(write: Callable[..., Sequence[int]], *arguments: Any) -> TokenIds:
    """Return the ids of an environment's messages. Messages that tokenizer or template refuse are a fault of
    the environment, which need not end the run."""
    try:
        return token_ids(write(*arguments))
    except ValueError as error:
        raise EpisodeFaultError("error", f"its messages cannot be written: {error}") from None


def _merge_choices(earlier: ExpertIds | None, latest: ExpertIds) -> ExpertIds:
    """Return the record of a turn with that of earlier turns, whose tokens were sampled with those experts
    and may come from a cache now."""
    if earlier is None:
        return latest
    merged = latest.copy()
    merged[: len(earlier)] = np.where(earlier == no_expert(earlier), latest[: len(earlier)], earlier)
    return merged


def as_opened(prompt: Prompt, responses: Sequence[Sample]) -> Prompt:
    """Return the prompt as the environment opened it for these responses, so that corrections begin like
    them. Other prompts are returned unchanged. Raises ValueError if the opening does not end as the chat
    template begins the policy's turn."""
    if prompt.environment is None:
        return prompt
    opening_ids = next((r.prompt_token_ids for r in responses if len(r.token_ids)), prompt.token_ids)
    head = len(opening_ids) - len(prompt.tail_ids)
    if not np.array_equal(opening_ids[max(0, head) :], prompt.tail_ids):
        raise ValueError(
            f"{prompt.environment}: its opening must end with a user message, after which the chat "
            "template begins the policy's turn; corrections would have no place otherwise"
        )
    return replace(prompt, token_ids=opening_ids, head_length=head)
