"""Loading what --environment names: a class of our protocol or of another framework, or a server.

A framework is recognised by the methods of its class (docs/environments.md lists them), so none needs to be
installed."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_ibpo.config import ConfigError, load_hook
from megatron_ibpo.environments.frameworks import (
    GymEnvironment,
    SkyRLEnvironment,
    TextArenaEnvironment,
    TrlEnvironment,
    arguments_of,
)
from megatron_ibpo.environments.protocol import Environment
from megatron_ibpo.environments.trl import RewardFunctions, load_reward_functions, trl_tools
from megatron_ibpo.environments.verifiers_environment import VerifiersEnvironment, is_verifiers

FLAG = "--environment"
_LOOKED_FOR = (
    "reset, step, score and close (ours); init and step (SkyRL-Gym); run_episode and serving (verifiers); "
    "reset, step and get_observation (TextArena); reset with a parameter seed, and step (Gym, GEM); or reset "
    "and methods that are tools (TRL)"
)


def load_environment(target: str, rewards: Sequence[str] = ()) -> Callable[[], Environment]:
    """Return a function that makes an environment, one for each episode.

    Args:
        target: import path of a class, or of a function that returns an environment; or openenv://HOST:PORT.
        rewards: --environment-reward, import paths of TRL's reward functions.

    Raises:
        ConfigError: there is no such thing, its arguments are unknown, or no framework has its methods. The
            returned function raises it too: what a user's function makes is not known before it is called.
    """
    functions = load_reward_functions(rewards)
    if "://" in target:
        _refuse_rewards(target, functions, "a server")
        from megatron_ibpo.environments.openenv import OpenEnvironment, server_of  # others need no websockets

        return partial(OpenEnvironment, server_of(FLAG, target))
    factory = load_hook(FLAG, target)
    if is_verifiers(factory) and not isinstance(factory, type):  # loaded once, and shared by all episodes
        _refuse_rewards(target, functions, "of verifiers")
        return partial(VerifiersEnvironment, factory)
    if all(hasattr(factory, name) for name in ("load", "task_type")):
        raise ConfigError(
            f"{FLAG} {target}: a taskset of verifiers; name an environment that plays it, as "
            "docs/environments.md shows"
        )
    factory = load_hook(FLAG, target, called_with="no arguments")
    arguments = arguments_of(factory)
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
    if isinstance(factory, type):
        return partial(_adapter(target, functions, factory), factory)
    if "extras" in arguments:
        _refuse_rewards(target, functions, "of SkyRL-Gym's kind")
        return partial(SkyRLEnvironment, factory)
    return partial(_adapted, target, functions, factory)


def _refuse_rewards(target: str, functions: RewardFunctions, kind: str) -> None:
    if functions:
        raise ConfigError(
            f"--environment-reward scores environments of TRL's kind, and {target} is {kind}, which scores "
            "itself; drop the flag"
        )


def _adapted(target: str, functions: RewardFunctions, make: Callable[[], Any]) -> Environment:
    environment = make()
    return _adapter(target, functions, type(environment), environment)(lambda: environment)


def _adapter(
    target: str, functions: RewardFunctions, kind: type, environment: Any = None
) -> Callable[[Callable[..., Any]], Environment]:
    """Return a function that wraps a factory of environments in this project's protocol.

    Args:
        functions: reward functions of the run.
        environment: one of this kind, if there is one already: wrappers may have methods that classes lack.
    """
    candidate: Any = kind if environment is None else environment

    def has_methods(*names: str) -> bool:
        return all(callable(getattr(candidate, name, None)) for name in names)

    kinds: dict[str, tuple[bool, Callable[[Callable[..., Any]], Environment]]] = {
        "of this project's protocol": (has_methods("reset", "step", "score", "close"), lambda make: make()),
        "of verifiers": (is_verifiers(candidate), lambda make: VerifiersEnvironment(make())),
        "of SkyRL-Gym's kind": (has_methods("init", "step"), SkyRLEnvironment),
        "of TextArena's kind": (
            has_methods("reset", "step", "get_observation"),
            lambda make: TextArenaEnvironment(make()),
        ),
        "of Gym's kind": (
            has_methods("reset", "step") and "seed" in arguments_of(candidate.reset),
            lambda make: GymEnvironment(make()),
        ),
    }
    for name, (matches, adapter) in kinds.items():
        if matches:
            _refuse_rewards(target, functions, name)
            return adapter
    try:
        if has_methods("reset") and (trl_tools(kind) or has_methods("get_reward")):
            return lambda make: TrlEnvironment(make(), functions)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {target}: {error}") from error
    raise ConfigError(
        f"{FLAG} {target}: {kind.__name__} has the methods of no known framework. Known are {_LOOKED_FOR}"
    )
