"""Tool calls and reasoning in a policy's text, by format.

- Hermes: <tool_call>{"name": …, "arguments": {…}}</tool_call>, which Qwen 2.5 and Qwen3 write too. It serves
  templates that know no tools, and runs without a template.
- Qwen3.5 and GLM-4.5: arguments stand between tags, as bare text that may hold tags itself. It ends at a
  closing tag that is followed by the next argument or by the end of the call.
- Llama 3 and gpt-oss: ids are read by the parsers of the `renderers` package.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_ibpo.environments.protocol import Message, Tool
from megatron_ibpo.rewards.response import left_open

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_CLOSING_TAGS = (_CLOSING, "</function>", "</parameter>", "</arg_key>", "</arg_value>")
"""Tags that show, if one is left over after a call, that some call ends elsewhere than it seemed."""
_STRING_OR_END = re.compile(rf'"(?:[^"\\\n]|\\.)*+"?+|{_CLOSING}')
"""A string of JSON, also one without an end, or the end of a call."""

ReadCall = Callable[[str, int, int, Sequence[Tool]], tuple[dict[str, Any] | None, int]]
"""(text, place after `<tool_call>`, number of the call, tools) → the call and the place after it, or None and
a place from which its end is looked for."""


def tools_text(tools: Sequence[Tool]) -> str:
    """Return the text that shows the tools to the policy, as in Qwen's chat templates."""
    listed = "\n".join(
        json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools
    )
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{_OPENING}{_CLOSING} XML tags:\n{_OPENING}\n"
        f'{{"name": <function-name>, "arguments": <args-json-object>}}\n{_CLOSING}'
    )


def as_text(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Message]:
    """Return the messages with the tools in the system message, calls in the content, and answers of tools
    as messages of the user, for a template that knows no tools."""
    written: list[Message] = []
    for are_tool_messages, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_tool_messages:
            tool_responses = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            written.append({"role": "user", "content": "\n".join(tool_responses)})
        else:
            written += [_with_calls_in_content(message) for message in group]
    if tools:
        head = [written.pop(0)["content"]] if written and written[0]["role"] == "system" else []
        written.insert(0, {"role": "system", "content": "\n\n".join([*head, tools_text(tools)])})
    return written


def _with_calls_in_content(message: Message) -> Message:
    calls = [
        f"{_OPENING}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CLOSING}"
        for call in message.get("tool_calls", ())
    ]
    content = "\n".join([message.get("content") or "", *calls]).lstrip("\n") if calls else message["content"]
    return {key: message[key] for key in message if key != "tool_calls"} | {"content": content}


def read_text(
    text: str, *, thinks: bool = False, read_call: ReadCall | None = None, tools: Sequence[Tool] = ()
) -> Message:
    """Return the policy's message from its text, in time linear in the text. A call in thinking is a draft,
    also if the thinking has no end. `thinks`: the text begins inside of <think>, which the prompt has opened.
    `read_call` reads one call of another format than Hermes'."""
    reasoning = None
    if thinks or text.lstrip().startswith(_THOUGHT):
        thought, _, text = text.partition(_END_OF_THOUGHT)
        reasoning = thought.replace(_THOUGHT, "", 1).strip()
    spans, leftover = _call_spans(text, read_call or _read_call, tools)
    is_certain = read_call is None and all(span.call for span in spans)  # JSON shows where it ends
    if not is_certain and any(tag in leftover for tag in _CLOSING_TAGS):
        spans = [span._replace(call=None) for span in spans]
    content, calls, malformed, place = list[str](), list[dict[str, Any]](), list[str](), 0
    for span in spans:
        content.append(text[place : span.start if span.call else span.stop])
        if span.call is None:
            malformed.append(text[span.start : span.stop])
        else:
            calls.append(span.call)
        place = span.stop
    content.append(text[place:])
    return policy_message("".join(content), reasoning, calls, malformed)


class _Span(NamedTuple):
    """The place of a call, and the call, unless it is malformed."""

    start: int
    stop: int
    call: dict[str, Any] | None = None


def _call_spans(text: str, read_call: ReadCall, tools: Sequence[Tool]) -> tuple[list[_Span], str]:
    """Return the calls outside of thinking, and the text outside of thinking after the first of them."""
    spans, leftover, place, num_calls = list[_Span](), list[str](), 0, 0
    while (start := text.find(_OPENING, place)) >= 0:
        if left_open(text[place:start]):
            place = text.find(_END_OF_THOUGHT, start)
            if place < 0:
                return spans, "".join(leftover)
            continue
        if spans:
            leftover.append(text[place:start])
        call, place = read_call(text, start + len(_OPENING), num_calls, tools)
        if call is None:
            end = text.find(_CLOSING, place)
            place = end + len(_CLOSING) if end >= 0 else len(text)
        spans.append(_Span(start, place, call))
        num_calls += call is not None
    return spans, "".join([*leftover, text[place:]]) if spans else ""


def _read_call(
    text: str, start: int, number: int, tools: Sequence[Tool]
) -> tuple[dict[str, Any] | None, int]:
    """Read a call in JSON, in which tags within strings are text; see `ReadCall`."""
    tokens = _STRING_OR_END.finditer(text, start)
    end = next((token for token in tokens if token[0] == _CLOSING), None)
    if end is None:
        return None, len(text)
    try:
        value = read_json(text[start : end.start()])
    except ValueError:
        value = None
    if not isinstance(value, dict) or not ("arguments" in value or value.keys() <= {"name", "id", "type"}):
        return None, end.start()  # other keys, such as `parameters`, are not dropped
    call = tool_call(value.get("name"), value.get("arguments", {}), number)
    return call, end.start() if call is None else end.end()


def tool_call(name: object, arguments: object, number: int) -> dict[str, Any] | None:
    """Return a call as it stands in a message, with the id "call_<number>"; None if its name is not text, or
    its arguments are neither a JSON object nor the text of one."""
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        # Other parsers let through what no record and no connection can hold: NaN, half characters.
        name, arguments = read_json(json.dumps([name, arguments]))
    except (ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def policy_message(
    content: str, reasoning: str | None, calls: list[dict[str, Any]], malformed: list[str]
) -> Message:
    """Return the policy's message; what it lacks has no key. Content before thinking without an end is no
    answer, and belongs to the reasoning."""
    if not (calls or malformed) and left_open(content):
        reasoning, content = "\n".join(filter(None, [reasoning, content.strip()])), ""
    message: Message = {"role": "assistant", "content": content.strip()}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if malformed:
        message["malformed_tool_calls"] = malformed
    return message


_PYTHON_VALUES = {"True": True, "False": False, "None": None}
"""Values as Qwen3.5's template writes them."""
_CONTAINERS = {"[": "array", "{": "object"}
_DEEPEST = 16
"""Limit on schemas within schemas; a reference may lead to itself."""
_ANY_TYPE = frozenset({"any"})
"""The types of a schema that says none."""
_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def _argument_values(texts: Mapping[str, str], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the values of a call's arguments, each from its text; types of unknown tools are unknown."""
    matching = (tool.get("parameters", {}) for tool in tools if tool["name"] == name)
    parameters: dict[str, Any] = next(matching, {})
    schemas = parameters.get("properties", {})
    return {key: _value(text, _types(schemas.get(key), parameters)) for key, text in texts.items()}


def _value(text: str, types: frozenset[str]) -> Any:
    """Return the value of a text: what may be text stays text, except for null and for lists and objects
    where the schema allows them as well."""
    bare = text.strip()
    if "null" in types and bare in ("None", "null"):
        return None
    if "string" in types and _CONTAINERS.get(bare[:1]) not in types:
        return text
    if bare in _PYTHON_VALUES and types != _ANY_TYPE:
        return _PYTHON_VALUES[bare]
    try:
        return read_json(bare)
    except ValueError:
        return text


def _types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows, or _ANY_TYPE. A reference such as
    `#/$defs/Mode` starts from `root`."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return _ANY_TYPE
    types = frozenset[str]()
    if "$ref" in schema:
        types |= _types(_referenced(schema["$ref"], root), root, depth + 1)
    if "type" in schema:
        types |= frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
    else:
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
        types |= {_TYPE_NAMES.get(type(value), "object") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        types |= frozenset().union(*(_types(part, root, depth + 1) for part in schema.get(key, ())))
    if schema.get("nullable") is True and types:
        types |= {"null"}
    return _ANY_TYPE if not types or "any" in types else types


def _referenced(reference: Any, root: Any) -> Any:
    """Return what a reference within a schema leads to; None if it leads elsewhere."""
    place, *steps = str(reference).split("/")
    if place != "#":
        return None
    for step in steps:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


_NEXT_CALL = re.compile(r"</tool_call>\s*+<tool_call>")
"""Two calls, in a value: the first lacks the end of this value."""


@dataclass(frozen=True)
class TaggedFormat:
    """Patterns of the parts of a call, each of which is looked for where the one before it ended."""

    name: re.Pattern[str]
    """From after `<tool_call>` to the first argument, or to `end`."""
    key: re.Pattern[str]
    """From the start of an argument to its value."""
    value_end: re.Pattern[str]
    """From the end of a value to the next argument, or to `end`."""
    end: re.Pattern[str]

    def __call__(
        self, text: str, start: int, number: int, tools: Sequence[Tool]
    ) -> tuple[dict[str, Any] | None, int]:
        """Read the call whose `<tool_call>` ends at `start`. Return it with the id "call_<number>", or None
        if it is malformed, and the place where it ends or fails."""
        name = self.name.match(text, start)
        if name is None:
            return None, start
        texts, place = dict[str, str](), name.end()
        while (key := self.key.match(text, place)) is not None:
            starts, ends = _value_ends(self.value_end, text)
            following = bisect_right(ends, key.end())
            if following == len(ends):
                return None, len(text)
            value_start, value_stop = key.end(), max(key.end(), starts[following])
            if (cut := _NEXT_CALL.search(text, value_start, value_stop)) is not None:
                return None, cut.start()
            if key[1] in texts:
                return None, ends[following]
            texts[key[1]], place = text[value_start:value_stop], ends[following]
        end = self.end.match(text, place)
        if end is None:
            return None, place
        call = tool_call(name[1], _argument_values(texts, name[1], tools), number)
        return call, place if call is None else end.end()


@lru_cache(maxsize=1)
def _value_ends(value_end: re.Pattern[str], text: str) -> tuple[list[int], list[int]]:
    """Return where the ends of values in a text start and stop. They are looked for once: many calls without
    an end of their own would each look through the whole rest of the text."""
    spans = [match.span() for match in value_end.finditer(text)]
    return [start for start, _ in spans], [stop for _, stop in spans]


QWEN3_5 = TaggedFormat(
    name=re.compile(r"\s*+<function=([^<>\n]++)>\s*+"),
    key=re.compile(r"<parameter=([^<>\n]++)>\n?"),
    value_end=re.compile(r"\n?</parameter>\s*+(?=<parameter=|(?:</function>\s*+)?</tool_call>)"),
    end=re.compile(r"(?:</function>\s*+)?</tool_call>"),
)
"""`<function=NAME>`, `<parameter=KEY>`, the value between two newlines, `</parameter>`, `</function>`."""
GLM4_5 = TaggedFormat(
    name=re.compile(r"\s*+([^<>\s]++)\s*+(?=<arg_key>|</tool_call>)"),
    key=re.compile(r"<arg_key>\s*+([^<>\n]*[^<>\s])\s*+</arg_key>\s*+<arg_value>"),
    value_end=re.compile(r"</arg_value>\s*+(?=<arg_key>|</tool_call>)"),
    end=re.compile(r"</tool_call>"),
)
"""The name, `<arg_key>KEY</arg_key>`, `<arg_value>` and the value as it is, `</arg_value>`."""


_HARMONY = ("return", "call", "start", "end", "channel", "message", "constrain")

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
        """Return the message of a turn; a text that the parser fails on is content. `tools` are those of the
        episode; None if they are not known."""
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
    """Yield a reader for each family whose special tokens the tokenizer has. `prompt` has the ids of a
    conversation up to the start of the policy's turn, which may be inside of reasoning."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    import renderers  # takes a second: only for runs with environments

    with suppress(AssertionError):  # the tokenizer lacks a special token of the family
        parse = renderers.Llama3Renderer(tokenizer.library).parse_response
        yield FamilyReader(
            "Llama 3", tokenizer, lambda ids, tools: parse(ids, tools=tools or None, prompt_ids=prompt), []
        )
    yield from _harmony_readers(tokenizer, prompt)


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
