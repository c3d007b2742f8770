"""A Python method as a tool: its JSON schema from type hints and a Google-style docstring."""

import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from megatron_ibpo.environments.protocol import Tool

_JSON_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    NoneType: "null",
    list: "array",
    tuple: "array",
}
_LINES = re.compile(r"\s*\n\s*")


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return the tool that a function or method is, with the schema that `transformers.utils.get_json_schema`
    gives it.

    Args:
        function: with a type hint and a docstring entry for each argument; a method's `self` is left out.

    Raises:
        ValueError: a hint or a description is missing; the message names it.
    """
    name = function.__name__
    doc = docstring_parser.parse(inspect.getdoc(function) or "", style=docstring_parser.DocstringStyle.GOOGLE)
    if not doc.description:
        raise ValueError(
            f"{name}() is a tool and has no docstring; begin its name with _ if it is not a tool"
        )
    described = {entry.arg_name: _LINES.sub(" ", entry.description or "") for entry in doc.params}
    properties, required = {}, []
    hints = get_type_hints(function)
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument == "self" and "self" not in hints:
            continue
        if argument not in hints or not described.get(argument):
            lacks = "type hint" if argument not in hints else "description under Args: in the docstring"
            raise ValueError(f"{name}() is a tool, and its argument {argument!r} has no {lacks}")
        properties[argument] = {**_schema(hints[argument]), "description": described[argument]}
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    tool: Tool = {"name": name, "description": doc.description.strip(), "parameters": parameters}
    if "return" in hints:
        tool["return"] = _schema(hints["return"])
        if doc.returns is not None:
            parts = (doc.returns.type_name, doc.returns.description)
            tool["return"]["description"] = ": ".join(part for part in parts if part)
    return tool


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, UnionType):
        schema = _union([_schema(argument) for argument in arguments if argument is not NoneType])
        return schema | ({"nullable": True} if NoneType in arguments else {})
    if origin is Literal:
        types = list(dict.fromkeys(_JSON_TYPES[type(value)] for value in arguments))
        return {"type": types[0] if len(types) == 1 else types, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple and Ellipsis not in arguments:
        return {"type": "array", "prefixItems": [_schema(argument) for argument in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    return {"type": _JSON_TYPES.get(hint, "object")}


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    if all(schema.keys() == {"type"} for schema in schemas):
        types = sorted({schema["type"] for schema in schemas})
        return {"type": types[0] if len(types) == 1 else types}
    return {"anyOf": schemas}
