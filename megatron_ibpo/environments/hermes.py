"""Tools in plain text, in the format of Hermes, which Qwen 2.5 and Qwen3 write too: a call is
<tool_call>{"name": …, "arguments": {…}}</tool_call>. It serves templates that know no tools, and runs without
a template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.environments.protocol import Message, Tool
from megatron_ibpo.rewards.thinking import left_open

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
    also if the thinking has no end.

    Args:
        thinks: the text begins inside of <think>, which the prompt has opened.
        read_call: reads one call of another format than Hermes'.
    """
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
    if not isinstance(value, dict) or _misses_arguments(value):
        return None, end.start()
    call = tool_call(value.get("name"), value.get("arguments", {}), number)
    return call, end.start() if call is None else end.end()


def _misses_arguments(call: dict[str, Any]) -> bool:
    """Return whether a call has other keys, such as `parameters`, in place of `arguments`: reading it as one
    without arguments would drop them."""
    return "arguments" not in call and not call.keys() <= {"name", "id", "type"}


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
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


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
