"""Tool calls and reasoning in the formats of Llama 3 and gpt-oss, read by the parsers of the `renderers`
package. Formats with `<tool_call>` are read as text: `hermes`, `tagged_calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_ibpo.environments.hermes import policy_message, tool_call
from megatron_ibpo.environments.protocol import Message, Tool

_HARMONY = ("return", "call", "start", "end", "channel", "message", "constrain")
"""Marks of gpt-oss' format."""

_MARK = "<|start|>"
_MOST_MARKS = 128
"""A turn with more marks is read as text: for each of them the parsers may search all of the turn, which
takes minutes if a model repeats itself."""

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
            tools: those of the episode; None if they are not known.
        """
        if self.family == "Llama 3" and tools is not None and not tools:
            # A call there is an answer in JSON, which may be what an environment without tools asks for.
            return policy_message(self.tokenizer.decode(ids), None, [], [])
        turn = [*self.header, *ids]
        text = self.tokenizer.decode_all(ids)
        if text.count(_MARK) > _MOST_MARKS:
            return policy_message(self.tokenizer.decode(ids), None, [], [text])
        try:
            parsed = self.parse(turn, list(tools or ()))
            calls, malformed = list[dict[str, Any]](), list[str]()
            for attempt in parsed.tool_calls:
                call = tool_call(attempt.name, attempt.arguments, len(calls))
                if call is None or malformed:  # after a malformed call, one may be a part of its text
                    malformed.append(self.tokenizer.decode_all(turn[slice(*attempt.token_span)]))
                else:
                    calls.append(call)
        except Exception:  # such as numbers with thousands of digits: a model may write anything
            return policy_message(self.tokenizer.decode(ids), None, [], [text])
        content = "\n".join([parsed.content, *malformed])
        return policy_message(content, (parsed.reasoning_content or "").strip(), calls, malformed)


def family_readers(tokenizer: Tokenizer, prompt: list[int]) -> Iterator[FamilyReader]:
    """Yield a reader for each family whose special tokens the tokenizer has.

    Args:
        prompt: ids of a conversation up to the start of the policy's turn, which may be inside of reasoning.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    import renderers  # takes a second: only for runs with environments

    try:
        renderer = renderers.Llama3Renderer(tokenizer.library)
    except AssertionError:  # the tokenizer lacks a special token of the family
        pass
    else:
        yield FamilyReader("Llama 3", tokenizer, partial(_parsed, renderer, prompt), [])
    yield from _harmony_readers(tokenizer, prompt)


def _parsed(renderer: Any, prompt: list[int], ids: list[int], tools: list[Tool]) -> Any:
    return renderer.parse_response(ids, tools=tools or None, prompt_ids=prompt)


def _harmony_readers(tokenizer: HuggingFaceTokenizer, prompt: list[int]) -> Iterator[FamilyReader]:
    """Yield the reader of gpt-oss' format. The package's class for it would fetch a vocabulary from the
    network, which the parser does without."""
    from renderers import ParsedResponse
    from renderers.parsing import parse_gpt_oss

    vocabulary = tokenizer.library.get_vocab()
    marks = {f"{mark}_id": vocabulary.get(f"<|{mark}|>") for mark in _HARMONY}
    if None in marks.values() or marks["start_id"] not in prompt:
        return
    header = prompt[len(prompt) - 1 - prompt[::-1].index(marks["start_id"]) :]

    def parse(ids: list[int], tools: list[Tool]) -> Any:
        if marks["message_id"] not in ids:  # the parser drops what is in no channel
            return ParsedResponse(tokenizer.decode(ids[len(header) :]))
        return parse_gpt_oss(tokenizer.library, ids, **marks)

    yield FamilyReader("gpt-oss", tokenizer, parse, header)
