"""Loading what --environment names: a class of our protocol or of another framework, or a server.

A framework is recognised by the methods of its class (docs/environments.md lists them), so none needs to be
installed."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_ibpo.config import ConfigError, load_hook
from megatron_ibpo.environments.frameworks import (
    GymEnvironment,
    SkyRLEnvironment,
    TextArenaEnvironment,
    TrlEnvironment,
    arguments_of,
    trl_tools,
)
from megatron_ibpo.environments.protocol import Environment

FLAG = "--environment"
_LOOKED_FOR = (
    "reset, step, score and close (ours); init and step (SkyRL-Gym); reset, step and get_observation "
    "(TextArena); reset with a parameter seed, and step (Gym, GEM); or reset and methods that are tools (TRL)"
)


def load_environment(target: str) -> Callable[[], Environment]:
    """Return a function that makes an environment, one for each episode.

    Args:
        target: import path of a class, or of a function that returns an environment; or openenv://HOST:PORT.

    Raises:
        ConfigError: there is no such thing, its arguments are unknown, or no framework has its methods. The
            returned function raises it too: what a user's function makes is not known before it is called.
    """
    if "://" in target:
        from megatron_ibpo.environments.openenv import OpenEnvironment, server_of  # others need no websockets

        return partial(OpenEnvironment, server_of(FLAG, target))
    made = load_hook(FLAG, target, called_with="no arguments")
    arguments = arguments_of(made)
    required = [
        name
        for name, parameter in arguments.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and name != "extras"
    ]
    if required:
        raise ConfigError(
            f"{FLAG} {target}: its constructor needs {', '.join(required)}; name a function without "
            "arguments that returns the environment"
        )
    if isinstance(made, type):
        return partial(_adapter(target, made), made)
    if "extras" in arguments:
        return partial(SkyRLEnvironment, made)
    return partial(_adapted, target, made)


def _adapted(target: str, make: Callable[[], Any]) -> Environment:
    environment = make()
    return _adapter(target, type(environment), environment)(lambda: environment)


def _adapter(target: str, kind: type, environment: Any = None) -> Callable[[Callable[..., Any]], Environment]:
    """Return the function that turns what makes an environment into one of our protocol.

    Args:
        environment: one of this kind, if there is one already: wrappers may have methods that classes lack.
    """
    found: Any = kind if environment is None else environment

    def has(*names: str) -> bool:
        return all(callable(getattr(found, name, None)) for name in names)

    if has("reset", "step", "score", "close"):
        return lambda make: make()
    if has("init", "step"):
        return SkyRLEnvironment
    if has("reset", "step", "get_observation"):
        return lambda make: TextArenaEnvironment(make())
    if has("reset", "step") and "seed" in arguments_of(found.reset):
        return lambda make: GymEnvironment(make())
    try:
        if has("reset") and (trl_tools(kind) or has("get_reward")):
            return lambda make: TrlEnvironment(make())
    except ValueError as error:
        raise ConfigError(f"{FLAG} {target}: {error}") from error
    raise ConfigError(
        f"{FLAG} {target}: {kind.__name__} has the methods of no known framework. Known are {_LOOKED_FOR}"
    )
