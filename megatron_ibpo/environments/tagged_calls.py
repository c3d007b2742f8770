"""Calls whose arguments stand between tags, as bare text: the formats of Qwen3.5 and of GLM-4.5.

A value may hold tags itself, since nothing escapes them. It ends at a closing tag that is followed by the
next argument or by the end of the call. If text of a call is left over after that, it is no call."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.environments.hermes import tool_call
from megatron_ibpo.environments.protocol import Tool

_PYTHON_VALUES = {"True": True, "False": False, "None": None}
"""Values as Qwen3.5's template writes them."""
_CONTAINERS = {"[": "array", "{": "object"}
_DEEPEST = 16
"""Limit on schemas within schemas; a reference may lead to itself."""
_ANY_TYPE = frozenset({"any"})
"""The types of a schema that says none."""
_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def argument_values(texts: Mapping[str, str], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the values of a call's arguments, each from its text.

    Args:
        name: the tool that is called; a tool that is not among `tools` has no known types.
    """
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
    """Return the names of the JSON types that a schema allows, or _ANY.

    Args:
        root: the schema that a reference such as `#/$defs/Mode` starts from.
    """
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
        call = tool_call(name[1], argument_values(texts, name[1], tools), number)
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
