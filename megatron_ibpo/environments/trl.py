"""Tools and reward functions as TRL's GRPOTrainer takes them (TRL 1.16).

A tool is a method whose JSON schema comes from its type hints and a Google-style docstring. Reward
functions (`reward_funcs`) are called with one episode. They get lists of one: `prompts`, `completions` (the
messages after the prompt), `environments`, and every column of the prompt's row. `trainer_state` is None.
`log_metric(name, value)` makes a further number of the episode; `log_extra`, a column of TRL's table of
completions, has no effect. Ids of tokens are not at hand."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    for the episode does not count. Raises EpisodeFaultError if none has a value, and TypeError or ValueError
    if one returns something else than one number or None in a list.

    Args:
        awaited: returns the value of a coroutine, or the value itself if it is none.
        completion: the messages of the policy and of the tools.
        row: the columns of the prompt's row, with its messages as `prompt`.
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


def trl_tools(kind: type) -> list[Tool]:
    """Return the tools of a class as TRL takes them. Raises ValueError if one lacks a docstring, the type
    hint of an argument or its entry in the docstring."""
    from transformers.utils import get_json_schema  # takes a second; others need it not

    tools = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            try:
                tools.append(get_json_schema(method)["function"])
            except Exception as error:
                raise ValueError(f"{name}() is a tool, unless its name begins with _: {error}") from error
    return tools
