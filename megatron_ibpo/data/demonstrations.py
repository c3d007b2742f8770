"""Demonstrations: prompts with responses to learn from, for supervised fine-tuning.

A row is a chat, {"messages": [{"role", "content"}, …]}, or {"prompt": text or messages, "response": text}. A
chat may have "tools" beside it, and messages with "tool_calls".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Prompt, TrainSequence, token_ids
from megatron_ibpo.data.layouts import as_messages, check_text_only, checked
from megatron_ibpo.data.prompts import TooLongError, check_prompt, check_shown, check_size
from megatron_ibpo.data.row_prompts import Reader, template_settings
from megatron_ibpo.data.tables import Row
from megatron_ibpo.data.tokenizer import DataError, Message

CHAT_KEY = "messages"
"""Field of a row with a whole chat, unless --input-key names it."""
TOOLS_KEY = "tools"
"""Field of a row with the tools that its chat template shows, in OpenAI's form."""


@dataclass
class Turns:
    """A prompt and what follows it, as the policy sees it; only `is_trained` tokens are in the loss."""

    prompt: list[int]
    response: list[int]
    is_trained: list[bool]

    def add(self, ids: Sequence[int], *, is_trained: bool) -> None:
        self.response += ids
        self.is_trained += [is_trained] * len(ids)


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration(Prompt):
    """The prompt of a row, with the turns to learn from."""

    turns: tuple[Turns, ...] = ()

    def sequence(self, number: int, weight: float) -> TrainSequence:
        """Return a training sequence of advantage 1 for `turns[number]`."""
        turns = self.turns[number]
        return TrainSequence(
            token_ids(turns.prompt),
            token_ids(turns.response),
            np.array(turns.is_trained, np.bool_),
            advantage=1.0,
            weight=weight,
            prompt_index=self.index,
            group=self.index,
            index=number,
        )


@dataclass(frozen=True)
class DemonstrationReader(Reader):
    """A maker of demonstrations. `max_prompt_len` limits prompt and response together."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, CHAT_KEY, TOOLS_KEY)

    def of_row(self, row: Row) -> Demonstration:
        check_text_only(row)
        messages = self._chat(row)
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        if first == 0:
            raise DataError("the first message is the assistant's, so there is no prompt before it")
        question = messages[first - 1]["content"]
        messages = [*self.with_context(messages[:first]), *messages[first:]]
        check_size(sum(len(message["content"]) for message in messages), self.max_prompt_len)
        tools = _tools(row)
        if self.data.apply_chat_template:
            turns = self._chat_turns(messages, tools)
        else:
            turns = self._plain_turns(messages)
        for sequence in turns:
            ids = token_ids([*sequence.prompt, *sequence.response])
            if self.max_prompt_len is not None and len(ids) > self.max_prompt_len:
                raise TooLongError(
                    f"prompt and response have {len(ids)} tokens, and the context holds "
                    f"{self.max_prompt_len}; shorten them, leave the row out (--drop-long-prompts), or raise "
                    "--rollout-max-context-len"
                )
            check_prompt(ids, self.tokenizer, None)
        prompt = token_ids(turns[0].prompt)
        task = self.source.task or self.source.location
        return Demonstration(0, prompt, len(prompt), "", task, question, turns=tuple(turns))

    def _chat(self, row: Row) -> list[Message]:
        """Return the row as a chat with at least one turn of the assistant."""
        if row.get(self.label_key) is not None:
            if self.input_key not in row:
                raise DataError(
                    f"no field {self.input_key!r} beside {self.label_key!r}; name it by --input-key"
                )
            question = checked(row[self.input_key], self.input_key, "text or a list of messages")
            response = checked(row[self.label_key], self.label_key, "text")
            answer = {"role": "assistant", "content": response}
            return [*as_messages(question, self.input_key), answer]
        key = self.input_key if isinstance(row.get(self.input_key), list) else CHAT_KEY
        if row.get(key) is None:
            raise DataError(
                f"neither {CHAT_KEY!r} nor {self.input_key!r} and {self.label_key!r} (found: "
                f"{', '.join(map(repr, row)) or 'nothing'}); --input-key and --label-key name others"
            )
        if not isinstance(row[key], list):
            raise DataError(f"field {key!r} must be a list of messages, found {type(row[key]).__name__}")
        messages = as_messages([_with_content(message) for message in row[key]], key)
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(f"field {key!r} has no turn of the assistant to learn from")
        # the columns of a table are present in every message, if only as null
        return [{name: value for name, value in message.items() if value is not None} for message in messages]

    def _plain_turns(self, messages: Sequence[Message]) -> list[Turns]:
        if len(messages) != 2:
            raise DataError("the row is a chat: add --apply-chat-template")
        question, answer = (message["content"] for message in messages)
        turns = Turns(self.tokenizer.encode_prompt(question), [], [])
        turns.add([*self.tokenizer.encode(answer), self.tokenizer.eos_id], is_trained=True)
        return [turns]

    def _chat_turns(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Turns]:
        """Return the assistant's turns, each behind the very prompt that it has when it is sampled.

        A turn that only continues the text so far joins it. A template that shows earlier turns differently,
        for instance without their thinking, starts another sequence.
        """
        render = partial(self.tokenizer.render_chat, settings=template_settings(self.data), tools=tools)
        encode = self.tokenizer.encode
        last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
        if messages[last]["content"]:  # it may only call tools
            check_shown(messages[: last + 1], partial(render, generation_prompt=False))
        eos, turns = self.tokenizer.eos_id, list[Turns]()
        shown_text, pending_ids = "", list[int]()
        for number in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
            prompt_text = render(messages[:number])
            text_with_turn = render(messages[: number + 1], generation_prompt=False)
            if not text_with_turn.startswith(prompt_text):
                raise DataError(
                    f"message {number}: the chat template does not continue its own generation prompt with "
                    "the assistant's turn; --apply-chat-template-kwargs may change that"
                )
            if shown_text and prompt_text.startswith(shown_text):
                turns[-1].add([*pending_ids, *encode(prompt_text[len(shown_text) :])], is_trained=False)
            else:
                turns.append(Turns(self.tokenizer.encode_rendered(prompt_text), [], []))
            ids = encode(text_with_turn[len(prompt_text) :])
            if eos in ids:  # what the template writes after it is no part of the turn
                end = len(ids) - ids[::-1].index(eos)
                shown_text, pending_ids = text_with_turn, ids[end:]
            else:
                end, ids, shown_text = len(ids) + 1, [*ids, eos], ""
            turns[-1].add(ids[:end], is_trained=True)
        return turns


def _tools(row: Row) -> list[dict[str, Any]]:
    """Return the row's tools, each as {"name", "description", "parameters"}."""
    tools = row.get(TOOLS_KEY) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"field {TOOLS_KEY!r} must be a list of objects")
    return [tool.get("function", tool) for tool in tools]


def _with_content(message: Any) -> Any:
    """Return a message that only calls tools with empty content; data sets write null there, or nothing."""
    if isinstance(message, dict) and message.get("tool_calls") and message.get("content") is None:
        return message | {"content": ""}
    return message
