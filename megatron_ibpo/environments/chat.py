"""A model's chat format as token ids, for conversations that grow turn by turn: no turn of the policy is ever
written anew. The ids that extend a conversation are those that the checkpoint's template puts after the end
of an assistant's turn, found in a short conversation in which the assistant says a marker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from megatron_ibpo.data.prompts import check_shown
from megatron_ibpo.data.tokenizer import DataError, Tokenizer, decoder_with, id_of
from megatron_ibpo.environments.protocol import Message, Tool
from megatron_ibpo.environments.tool_calls import (
    GLM4_5,
    QWEN3_5,
    ReadCall,
    as_text,
    family_readers,
    policy_message,
    read_text,
    tools_text,
)
from megatron_ibpo.rewards.response import open_at_end

_MARKER = "MARKERc9f0f895fb98ab91"
_USER: Message = {"role": "user", "content": "Hello."}

_PROBE_TOOL: Tool = {
    "name": "look_up",
    "description": "Look up a word.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string"}, "most": {"type": "integer"}},
        "required": ["word", "most"],
    },
}
_PROBE_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "two words", "most": 3}},
}
_PROBE_ANSWER: Message = {"role": "tool", "tool_call_id": "call_0", "name": "look_up", "content": "found"}

_CALL = "<tool_call>"
_SAME_ENDS = (
    ("<|return|>", "<|end|>"),
    ("<|return|>", "<|call|>"),
    ("<|call|>", "<|end|>"),
    ("<|eom_id|>", "<|eot_id|>"),
)
"""(end that a model may write, end that its template may write there instead)."""

LONGEST_READ = 2**17
"""Most ids of a turn in which calls of tools are looked for. What a longer one says after its thinking is
text: the parsers take a microsecond or more for each id, and an environment waits for no novel."""

Reader = Callable[[Sequence[int], Sequence[Tool] | None], Message]


def open_chat(
    tokenizer: Tokenizer,
    eos_token_ids: Collection[int],
    *,
    applies_template: bool,
    settings: Mapping[str, Any] | None = None,
) -> PlainChat | TemplateChat:
    """Return the chat format of a checkpoint; its `notes` are lines to print. Raises DataError if there is no
    chat template, or conversations in it cannot be extended.

    Args:
        eos_token_ids: the checkpoint's ids that end a turn, besides the tokenizer's own.
        applies_template: --apply-chat-template; otherwise turns are plain text.
        settings: further arguments of the template (--apply-chat-template-kwargs).
    """
    ends = {*eos_token_ids, tokenizer.eos_id}
    return TemplateChat(tokenizer, ends, settings) if applies_template else PlainChat(tokenizer, ends)


class _TurnReader:
    """Reads the policy's turns."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._opened = ""
        """Mark of thinking in which every turn begins."""
        self._decode = self._decode_all = decoder_with(_CALL, tokenizer)
        """Decoders without special tokens (but those of calls) and with all of them."""
        self._read: Reader = lambda ids, _: read_text(self._decode(ids))

    def read(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> Message:
        turn_ids = ids[:-1] if ids and ids[-1] in self._ends else ids
        if len(turn_ids) > LONGEST_READ:
            reasoning, _, content = (self._opened + self._decode(turn_ids)).rpartition("</think>")
            return policy_message(content, reasoning.replace("<think>", "", 1).strip(), [], [])
        message = self._read(turn_ids, tools)
        if tools is None or tools or not ("tool_calls" in message or "malformed_tool_calls" in message):
            return message
        text = self._opened + self._decode_all(turn_ids)  # without tools, what is a call elsewhere is content
        return policy_message(text.rpartition("</think>")[2], message.get("reasoning_content"), [], [])


class PlainChat(_TurnReader):
    """Turns as plain text, one after the other: for runs without a chat template. Calls of tools are in
    Hermes' format."""

    notes: tuple[str, ...] = ()

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        tool_lines = [tools_text(tools) + "\n"] if tools else []
        return self._tokenizer.encode_prompt("".join([*tool_lines, *(m["content"] for m in messages)]))

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        _check_ended(ids, self._ends)
        return self._tokenizer.encode("".join(message["content"] for message in messages))


class TemplateChat(_TurnReader):
    """Turns as the checkpoint's chat template writes them.

    Tools are written and read in the template's own format if that is one of `family_readers` and reads back
    what the template writes; otherwise as text in Hermes' format, in the system message and the user's."""

    def __init__(
        self, tokenizer: Tokenizer, ends: Collection[int], settings: Mapping[str, Any] | None = None
    ) -> None:
        """Try the template on short conversations. Raises DataError if there is none, or if it refuses
        conversations or does not show turns as they are."""
        super().__init__(tokenizer, ends)
        self._settings = settings or {}
        self._same_ends = {tuple(id_of(mark, tokenizer) for mark in pair) for pair in _SAME_ENDS}
        self._marks_call = self._shows_tools = False
        self._following([_USER])
        check_shown([_USER], self._render)
        prompt = self._render([_USER])
        self._opened = open_at_end(prompt)
        text_reader = self._text_reader(self._decode)
        self._decode, self._decode_all = tokenizer.decode, tokenizer.decode_all
        family, self._read = self._own_format(prompt) or (None, text_reader)
        self._shows_tools = family is not None
        tools = (
            f"the chat template shows tools, and calls are read in the format of {family}"
            if family is not None
            else "the chat template shows no tools, or writes calls in a format that is not known here, so "
            "tools are shown in the system message, and calls are read in the format of Hermes (<tool_call>)"
        )
        self.notes: tuple[str, ...] = (f"chat: {tools}", *self._rewriting())

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        if self._shows_tools:
            return self._tokenizer.encode_rendered(self._render(messages, tools))
        return self._tokenizer.encode_rendered(self._render(as_text(messages, tools)))

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        _check_ended(ids, self._ends)
        following = self._following(messages if self._shows_tools else as_text(messages))
        return self._missing_after(ids[-1], self._tokenizer.encode(following))

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool = True) -> str:
        return self._tokenizer.render_chat(messages, self._settings, tools=tools, generation_prompt=prompt)

    def _following(self, messages: Sequence[Message]) -> str:
        """Return the text from the end of an assistant's turn to the start of its next one, with the messages
        between."""
        if self._marks_call and messages and messages[0]["role"] == "tool":
            function = {"name": messages[0].get("name", ""), "arguments": {"text": _MARKER}}
            call = {"id": messages[0].get("tool_call_id"), "type": "function", "function": function}
            assistant_turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            assistant_turn = {"role": "assistant", "content": _MARKER}
        _, marker, following = self._render([_USER, assistant_turn, *messages]).partition(_MARKER)
        if not marker:
            raise DataError(
                "the chat template does not show what the assistant said, so a conversation cannot be "
                "extended; use a checkpoint with another template, or drop --apply-chat-template"
            )
        if assistant_turn["content"]:
            return following
        texts = (self._tokenizer.decode_all([end]) for end in self._ends)
        ends = [place for text in texts if (place := following.find(text)) >= 0]
        return following[min(ends, default=0) :]

    def _missing_after(self, end: int, following: list[int]) -> list[int]:
        """Return what is missing of `following` after a turn that ends in the id `end`: a template may write
        another end after it, or none."""
        for place, token in enumerate(following):
            if token == end or (end, token) in self._same_ends:
                return following[place + 1 :]
            if self._tokenizer.decode_all([token]).strip():
                break
        return following

    def _text_reader(
        self, decode: Callable[[Sequence[int]], str], read_call: ReadCall | None = None
    ) -> Reader:
        thinks = self._opened == "<think>"
        return lambda ids, tools: read_text(
            decode(ids), thinks=thinks, read_call=read_call, tools=tools or ()
        )

    def _own_format(self, prompt: str) -> tuple[str, Reader] | None:
        """Return the name and the reader of the template's own format of calls; None if the template knows no
        tools, or no reader reads back what it writes."""
        try:
            if _PROBE_TOOL["name"] not in self._render([_USER], [_PROBE_TOOL]):
                return None
            called: Message = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
            text = self._render([_USER, called], prompt=False)
            self._try_answer()
        except DataError:
            return None
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
        turn = self._tokenizer.encode(text[sum(1 for _ in shared) :])
        first_end = next((place for place, token in enumerate(turn) if token in self._ends), len(turn))
        rendered = self._tokenizer.encode_rendered(prompt)
        readers: dict[str, Reader] = {
            reader.family: reader for reader in family_readers(self._tokenizer, rendered)
        }
        decode = self._tokenizer.decode_all  # a special token in an argument belongs to it
        for family, read_call in (("Hermes", None), ("Qwen3.5", QWEN3_5), ("GLM-4.5", GLM4_5)):
            readers[family] = self._text_reader(decode, read_call)
        for family, reader in readers.items():
            if reader(turn[:first_end], [_PROBE_TOOL]).get("tool_calls") == [_PROBE_CALL]:
                return family, reader
        return None

    def _try_answer(self) -> None:
        """Find out whether the template takes the answer of a tool after any turn, or after a call alone."""
        try:
            self._following([_PROBE_ANSWER])
        except DataError:
            self._marks_call = True
            self._following([_PROBE_ANSWER])

    def _rewriting(self) -> list[str]:
        """Return a note if the template writes an earlier turn differently from the last one."""
        turns = [_USER, {"role": "assistant", "content": "yes", "reasoning_content": "so", "thinking": "so"}]
        if self._render([*turns, _USER]).startswith(self._render(turns, prompt=False)):
            return []
        return [
            "chat: the template writes earlier turns differently from the last one (such as without "
            "their reasoning); an episode keeps every turn as the policy wrote it"
        ]


def _check_ended(ids: Sequence[int], ends: Collection[int]) -> None:
    if not ids or ids[-1] not in ends:
        raise ValueError("a turn that was cut cannot be extended: it has no end-of-sequence id")
