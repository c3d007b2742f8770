"""Tools in plain text, in the format of Hermes, which Qwen 2.5 and Qwen3 write too: a call is
<tool_call>{"name": …, "arguments": {…}}</tool_call>. For templates that know no tools, and for runs without
one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.environments.protocol import Message, Tool
from megatron_ibpo.rewards.thinking import left_open

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


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
    for are_answers, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_answers:
            answers = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            written.append({"role": "user", "content": "\n".join(answers)})
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


def read_text(text: str, *, thinks: bool = False) -> Message:
    """Return the policy's message from its text, in time linear in the text.

    Args:
        thinks: the text begins inside of <think>, which the prompt has opened.
    """
    reasoning = None
    if thinks or text.lstrip().startswith(_THOUGHT):
        thought, has_end, rest = text.partition(_END_OF_THOUGHT)
        if not has_end and _OPENING in text:  # a call ends reasoning that has no end, as in vLLM's parsers
            start = text.index(_OPENING)
            thought, rest = text[:start], text[start:]
        reasoning, text = thought.replace(_THOUGHT, "", 1).strip(), rest
    content, calls, malformed = list[str](), list[dict[str, Any]](), list[str]()
    place = 0
    while (start := text.find(_OPENING, place)) >= 0:
        end = text.find(_CLOSING, start)
        stop = end + len(_CLOSING) if end >= 0 else len(text)
        call = _read_call(text[start + len(_OPENING) : end], len(calls)) if end >= 0 else None
        content.append(text[place : start if call else stop])
        if call is None:
            malformed.append(text[start:stop])
        else:
            calls.append(call)
        place = stop
    content.append(text[place:])
    return policy_message("".join(content), reasoning, calls, malformed)


def _read_call(text: str, number: int) -> dict[str, Any] | None:
    try:
        value = read_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return tool_call(value.get("name"), value.get("arguments", {}), number)


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
