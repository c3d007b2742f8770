"""Values of arguments that a format writes as bare text, by the schema of their tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.environments.protocol import Tool

_PYTHON_VALUES = {"True": True, "False": False, "None": None}
"""Values as Qwen3.5's template writes them."""
_CONTAINERS = {"[": "array", "{": "object"}
_DEEPEST = 16
"""Limit on schemas within schemas; a reference may lead to itself."""
_ANY = frozenset({"any"})
"""The types of a schema that says none."""
_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def argument_values(texts: Mapping[str, str], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the values of a call's arguments, each from its text.

    Args:
        name: the tool that is called; of one that is not among `tools`, no types are known.
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
    if bare in _PYTHON_VALUES and types != _ANY:
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
        return _ANY
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
    return _ANY if not types or "any" in types else types


def _referenced(reference: Any, root: Any) -> Any:
    """Return what a reference within a schema leads to; None if it leads elsewhere."""
    place, *steps = str(reference).split("/")
    if place != "#":
        return None
    for step in steps:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
