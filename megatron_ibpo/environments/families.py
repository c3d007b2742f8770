"""Tool calls and reasoning in the format of a model's family, read by the parsers of the `renderers`
package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_ibpo.environments.hermes import policy_message, tool_call
from megatron_ibpo.environments.protocol import Message, Tool

_HARMONY = ("return", "call", "start", "end", "channel", "message", "constrain")
"""Marks of gpt-oss' format."""

_MARKS = ("<function=", "<parameter=", "<|start|>")
_MOST_MARKS = 128
"""A turn with more marks is read as text: for each of them the parsers may search all of the turn, which
takes minutes if a model repeats itself."""

_HEADER = "<|im_start|>"
"""A turn that begins with the header of another is read as text, too: the parsers copy the turn for each
newline after it."""

_PYTHON_VALUES = {"True": True, "False": False, "None": None}

Parse = Callable[[list[int], list[Tool]], Any]


@dataclass(frozen=True)
class FamilyReader:
    """Reads turns of the policy in one family's format."""

    family: str
    tokenizer: Tokenizer
    parse: Parse
    header: list[int]
    """Ids of the prompt that belong to the turn, for the parser."""

    def __call__(self, ids: Sequence[int], tools: Sequence[Tool] | None) -> Message:
        """Return the message of a turn; a text that the parser fails on is content.

        Args:
            tools: tell the types of arguments where the format has none; None if they are not known.
        """
        if self.family == "Llama 3" and tools is not None and not tools:
            # A call there is an answer in JSON, which may be what an environment without tools asks for.
            return policy_message(self.tokenizer.decode(ids), None, [], [])
        turn = [*self.header, *ids]
        text = self.tokenizer.decode_all(ids)
        if text.startswith(_HEADER) or sum(text.count(mark) for mark in _MARKS) > _MOST_MARKS:
            return policy_message(self.tokenizer.decode(ids), None, [], [text])
        try:
            parsed = self.parse(turn, list(tools or ()))
            calls, malformed = list[dict[str, Any]](), list[str]()
            for attempt in parsed.tool_calls:
                is_whole = attempt.status != "malformed_structure"
                arguments = _typed(attempt.arguments, attempt.name, tools or ())
                call = tool_call(attempt.name, arguments, len(calls)) if is_whole else None
                if call is None:
                    malformed.append(self.tokenizer.decode_all(turn[slice(*attempt.token_span)]))
                else:
                    calls.append(call)
        except Exception:  # such as numbers with thousands of digits: a model may write anything
            return policy_message(self.tokenizer.decode(ids), None, [], [text])
        content = "\n".join([parsed.content, *malformed])
        return policy_message(content, (parsed.reasoning_content or "").strip(), calls, malformed)


def _typed(arguments: Any, name: str | None, tools: Sequence[Tool]) -> Any:
    """Return the arguments with True, False and None as values where the schema asks for no text: Qwen3.5's
    template writes them as Python does, which the parser leaves as text."""
    tool = next((tool for tool in tools if tool["name"] == name), None)
    if tool is None or not isinstance(arguments, dict):
        return arguments
    schemas = tool.get("parameters", {}).get("properties", {})
    return {
        key: _PYTHON_VALUES.get(value, value)
        if isinstance(value, str) and schemas.get(key, {}).get("type") not in (None, "string")
        else value
        for key, value in arguments.items()
    }


def family_readers(tokenizer: Tokenizer, prompt: list[int]) -> Iterator[FamilyReader]:
    """Yield a reader for each family whose special tokens the tokenizer has.

    Args:
        prompt: ids of a conversation up to the start of the policy's turn, which may be inside of reasoning.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    import renderers  # takes a second: only for runs with environments

    parsers: dict[str, Callable[[], Parse]] = {
        "Qwen3": lambda: _parser(renderers.Qwen3Renderer(tokenizer.library), prompt),
        "Qwen3.5": lambda: _parser(renderers.Qwen35Renderer(tokenizer.library), prompt),
        "GLM-4.5": lambda: _glm_parser(tokenizer, prompt),
        "Llama 3": lambda: _parser(renderers.Llama3Renderer(tokenizer.library), prompt),
    }
    for family, make in parsers.items():
        try:
            yield FamilyReader(family, tokenizer, make(), [])
        except AssertionError:  # the tokenizer lacks a special token of the family
            continue
    yield from _harmony_readers(tokenizer, prompt)


def _parser(renderer: Any, prompt: list[int]) -> Parse:
    return lambda ids, tools: renderer.parse_response(ids, tools=tools or None, prompt_ids=prompt)


def _glm_parser(tokenizer: HuggingFaceTokenizer, prompt: list[int]) -> Parse:
    """Return a parser that takes a turn without any mark of reasoning for an answer. The package takes it for
    reasoning without an end."""
    import renderers

    thinking, answering = (
        _parser(
            renderers.GLM45Renderer(tokenizer.library, renderers.GLM45RendererConfig(enable_thinking=on)), []
        )
        for on in (True, False)
    )
    begin, end = tokenizer.library.convert_tokens_to_ids(["<think>", "</think>"])
    begins_inside = tokenizer.decode_all(prompt).rstrip().endswith("<think>")

    def parse(ids: list[int], tools: list[Tool]) -> Any:
        return (thinking if begins_inside or begin in ids or end in ids else answering)(ids, tools)

    return parse


def _harmony_readers(tokenizer: HuggingFaceTokenizer, prompt: list[int]) -> Iterator[FamilyReader]:
    """Yield the reader of gpt-oss' format. The package's class for it would fetch a vocabulary from the
    network, which the parser does without."""
    from renderers import ParsedResponse
    from renderers.parsing import parse_gpt_oss

    known = tokenizer.library.get_vocab()
    marks = {f"{mark}_id": known.get(f"<|{mark}|>") for mark in _HARMONY}
    if None in marks.values() or marks["start_id"] not in prompt:
        return
    header = prompt[len(prompt) - 1 - prompt[::-1].index(marks["start_id"]) :]

    def parse(ids: list[int], tools: list[Tool]) -> Any:
        if marks["message_id"] not in ids:  # the parser drops what is in no channel
            return ParsedResponse(tokenizer.decode(ids[len(header) :]))
        return parse_gpt_oss(tokenizer.library, ids, **marks)

    yield FamilyReader("gpt-oss", tokenizer, parse, header)
