"""Tools and reward functions as TRL's GRPOTrainer takes them (TRL 1.16).

A tool is a method whose JSON schema comes from its type hints and a Google-style docstring. Reward
functions (`reward_funcs`) are called with one episode. They get lists of one: `prompts`, `completions` (the
messages after the prompt), `environments`, and every column of the prompt's row. `trainer_state` is None.
`log_metric(name, value)` makes a further number of the episode; `log_extra`, a column of TRL's table of
completions, has no effect. Ids of tokens are not at hand."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.config import ConfigError, load_hook
from megatron_ibpo.environments.protocol import EpisodeFaultError, Message, Tool

FLAG = "--environment-reward"
RewardFunctions = Mapping[str, Callable[..., Any]]
"""Reward functions by the name under which their values are recorded."""


def load_reward_functions(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the functions of --environment-reward. Raises ConfigError if one cannot be loaded or needs ids
    of tokens, or if two have the same name."""
    functions: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = load_hook(FLAG, path, called_with="prompts, completions, environments and columns")
        name = path.rpartition(":")[2]
        if name in functions:
            raise ConfigError(f"{FLAG} {path}: another function is called {name} too; rename one of them")
        ids = inspect.signature(function).parameters.get("completion_ids")
        if ids is not None and ids.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{FLAG} {path}: reads completion_ids, which environments here do not have; give it "
                "a default, or read the text of `completions`"
            )
        functions[name] = function
    return functions


def call_reward_functions(
    functions: RewardFunctions,
    awaited: Callable[[Any], Any],
    environment: Any,
    completion: Sequence[Message],
    row: Mapping[str, Any],
) -> dict[str, float]:
    """Return the value of each function, and the numbers it logged. As in TRL, a function that returns None
    for the episode does not count.

    Args:
        awaited: returns the value of a coroutine, or the value itself if it is none.
        completion: the messages of the policy and of the tools.
        row: the columns of the prompt's row, with its messages as `prompt`.

    Raises:
        EpisodeFaultError: no function has a value.
        TypeError, ValueError: a function returns something else than one number or None in a list.
    """
    values: dict[str, float] = {}
    logged: dict[str, float] = {}
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    arguments_of_trl = {
        "prompts": [row["prompt"]],
        "completions": [list(completion)],
        "environments": [environment],
        "trainer_state": None,
        "log_metric": logged.__setitem__,
        "log_extra": lambda *_: None,
    }
    for name, function in functions.items():
        value = list(awaited(function(**{**columns, **arguments_of_trl})))
        if len(value) != 1:
            raise ValueError(f"{name}() returned {len(value)} rewards for one episode")
        if value[0] is not None:
            values[name] = read_reward(value[0])[0]
    if not values:
        raise EpisodeFaultError("error", f"{', '.join(functions)} returned None: the episode has no reward")
    return logged | values


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


def trl_tools(kind: type) -> list[Tool]:
    """Return the tools of a class as TRL takes them. Raises ValueError as `tool_of` does."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return [
        tool_of(method)
        for name, method in methods
        if not name.startswith("_") and name not in ("reset", "get_reward")
    ]


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return a function or method as a tool, with the schema from `transformers.utils.get_json_schema`.

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
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, UnionType):
        schema = _union([_schema(argument) for argument in arguments if argument is not NoneType])
        return schema | ({"nullable": True} if NoneType in arguments else {})
    if origin is Literal:
        types = list(dict.fromkeys(_JSON_TYPES[type(value)] for value in arguments))
        return {"type": types[0] if len(types) == 1 else types, "enum": list(arguments)}
    if origin is tuple and Ellipsis not in arguments:
        return {"type": "array", "prefixItems": [_schema(argument) for argument in arguments]}
    if origin in (list, tuple):
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
