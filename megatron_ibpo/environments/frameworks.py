"""Environments of other frameworks behind our protocol, and the loading of what --environment names.

No framework is imported: it is recognised by the methods of its class, which it documents
(docs/environments.md lists them). Policies write text, so an observation must be text too. Python's and
NumPy's global generators are seeded, since many environments draw from these."""

import asyncio
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy import random as numpy_random  # loaded here, once; numpy itself would load it in each episode

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.config import ConfigError, load_hook
from megatron_ibpo.environments.protocol import (
    Environment,
    EpisodeFaultError,
    Message,
    Opening,
    Tool,
    Turn,
)
from megatron_ibpo.environments.trl import (
    RewardFunctions,
    call_reward_functions,
    load_reward_functions,
    trl_tools,
)
from megatron_ibpo.environments.verifiers_environment import VerifiersEnvironment, is_verifiers

FLAG = "--environment"
_SEEDS = 2**31
"""NumPy refuses seeds of more than 32 bits, so an environment gets the seed modulo this."""


class TrlEnvironment:
    """An environment class of the kind that TRL's GRPOTrainer takes as `environment_factory` (TRL 1.16): its
    public methods are tools, except `reset` and `get_reward`.

    As in TRL, the text that `reset` returns is appended to the prompt, a tool that raises answers with the
    error, and an episode is over at the first message without a call. Its score is the sum of `get_reward()`
    and of the reward functions; without either it is the attribute `reward`."""

    def __init__(self, environment: Any, reward_functions: RewardFunctions | None = None) -> None:
        self._environment = environment
        self._reward_functions = reward_functions or {}
        self._row: dict[str, Any] = {}
        self._completion: list[Message] = []
        self._tools = trl_tools(type(environment))
        self._loop = asyncio.Runner()  # for tools that are coroutines: one loop, as they may keep connections
        self._calls = self._errors = 0

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Reset the environment with the columns of the prompt's row that it accepts: the metadata, `prompt`
        and `label`."""
        _seeded(seed)
        self._row = row = {**metadata, "prompt": [_user(question)], "label": label}
        observation = self._environment.reset(**_accepted(self._environment.reset, row))
        kind = type(self._environment)
        # asked of the class first: a property may score as soon as it is read
        if not self._reward_functions and not any(
            hasattr(owner, name) for name in ("get_reward", "reward") for owner in (kind, self._environment)
        ):
            raise TypeError(
                f"{kind.__name__} has no get_reward(), and no attribute `reward` after reset(); name the "
                "functions that score it by --environment-reward file.py:function"
            )
        observation_text = "" if observation is None else _text(observation, "reset()")
        return Opening([_user(question + observation_text)], self._tools)

    def step(self, message: Message) -> Turn:
        calls = message.get("tool_calls") or []
        tool_messages = [self._answer(call) for call in calls]
        self._completion += [message, *tool_messages]
        return Turn(tool_messages, done=not calls)

    def score(self) -> dict[str, Any]:
        """Return the environment's reward, the value of each reward function, and how often tools were called
        and failed."""
        counts = {"tool_calls": self._calls, "tool_errors": self._errors}
        owns_reward = callable(getattr(self._environment, "get_reward", None))
        if not self._reward_functions and not owns_reward:
            return {"score": self._environment.reward} | counts
        reward = self._awaited(self._environment.get_reward()) if owns_reward else 0.0
        if not self._reward_functions:
            return {"score": reward} | counts
        values = call_reward_functions(
            self._reward_functions, self._awaited, self._environment, self._completion, self._row
        )
        total = reward + sum(values[name] for name in self._reward_functions if name in values)
        return values | {"score": total} | counts

    def close(self) -> None:
        """Let go of the environment. TRL knows no method for that: some have `_close`, or release what they
        hold in `__del__`."""
        if callable(close := getattr(self._environment, "_close", None)):
            close()
        del self._environment
        self._loop.close()

    def _answer(self, call: Mapping[str, Any]) -> Message:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._calls += 1
        try:
            if all(tool["name"] != name for tool in self._tools):
                raise ValueError(f"Tool {name} not found.")
            content = str(self._awaited(getattr(self._environment, name)(**arguments)))
        except EpisodeFaultError:
            raise
        except Exception as error:
            self._errors += 1
            content = str({"error": str(error)})
        return tool_answer(call, content)

    def _awaited(self, value: Any) -> Any:
        return self._loop.run(value) if inspect.iscoroutine(value) else value


class _Adapter:
    """An environment of another framework, and the sum of its rewards so far, which is the score."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._total = 0.0

    def score(self) -> Any:
        return self._total

    def close(self) -> None:
        if callable(close := getattr(self._environment, "close", None)):
            close()


class SkyRLEnvironment(_Adapter):
    """An environment of SkyRL-Gym (0.4): `init(prompt)` returns (messages, info), and `step(text)` a mapping
    with `observations`, `reward` and `done`. The score is the sum of rewards; numbers of `get_metrics()` are
    kept."""

    def __init__(self, make: Callable[..., Any]) -> None:
        """Keep `make`, which returns the environment; its argument `extras`, if it has one, is the row of the
        prompt."""
        super().__init__(None)
        self._make = make

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Make the environment for the prompt, with the label as `ground_truth`."""
        _seeded(seed)
        answer = {"ground_truth": label}  # most read it as `reward_spec`, aime as `reward_model`
        extras = {"reward_spec": answer, "reward_model": answer, "extra_info": dict(metadata), **metadata}
        self._environment = self._make(**_accepted(self._make, {"extras": extras}))
        messages, _ = self._environment.init([_user(question)])
        return Opening(messages)

    def step(self, message: Message) -> Turn:
        turn = self._environment.step(message_text(message))
        self._total += read_reward(turn["reward"])[0]
        return Turn(turn["observations"] or [_user("")], bool(turn["done"]))

    def score(self) -> dict[str, Any]:
        """Return the sum of rewards, and the environment's metrics that are numbers."""
        metrics = self._environment.get_metrics() if hasattr(self._environment, "get_metrics") else {}
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        return numbers | {"score": self._total}


class GymEnvironment(_Adapter):
    """A text environment with Gym's methods, as GEM's are (0.1): `reset(seed=…)` returns (text, info), and
    `step(text)` (text, reward, terminated, truncated, info). The score is the sum of rewards."""

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Reset the environment; the prompt's question, if there is any, stands before the observation."""
        observation, _ = _parts(self._environment.reset(seed=_seeded(seed)), "reset", "observation, info")
        return opening(question, _text(observation, "reset()"))

    def step(self, message: Message) -> Turn:
        names = "observation, reward, terminated, truncated, info"
        text, reward, terminated, truncated, _ = _parts(
            self._environment.step(message_text(message)), "step", names
        )
        self._total += read_reward(reward)[0]
        return Turn([_user(_text(text, "step()"))], bool(terminated or truncated))


class TextArenaEnvironment(_Adapter):
    """A game of TextArena (0.7) for one player: `reset(num_players=1, seed=…)`, `get_observation()`,
    `step(text)` returns (done, info), and `close()` (rewards, info).

    Only what is new to the policy is shown: no moves of its own, and no history, which most wrappers return
    at each turn. A game that is not over when turns or tokens end has the reward 0, and `unfinished` is 1."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._shown = ""
        self._closed = False

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Start the game; the prompt's question, if there is any, stands before its observation."""
        self._environment.reset(num_players=1, seed=_seeded(seed))
        return opening(question, self._observation())

    def step(self, message: Message) -> Turn:
        done, _ = _parts(self._environment.step(message_text(message)), "step", "done, info")
        return Turn(done=True) if done else Turn([_user(self._observation())])

    def score(self) -> dict[str, Any]:
        self._closed = True
        rewards, _ = _parts(self._environment.close(), "close", "rewards, info")
        return {"score": rewards[0] if rewards else 0.0, "unfinished": 0.0 if rewards else 1.0}

    def close(self) -> None:
        """Close the game, if `score` did not."""
        if not self._closed:
            super().close()

    def _observation(self) -> str:
        player, observation = self._environment.get_observation()
        if player != 0:
            raise ValueError(f"it is the turn of player {player}: only single-player games are supported")
        if isinstance(observation, list):
            return "\n".join(text for sender, text, *_ in observation if sender != player)
        text = _text(observation, "observation")
        new = text.removeprefix(self._shown) if text.startswith(f"{self._shown}\n") else text
        self._shown = text
        return new


def tool_answer(call: Mapping[str, Any], content: str) -> Message:
    """Return the message that answers a call of a tool."""
    return {
        "role": "tool",
        "tool_call_id": call.get("id"),
        "name": call["function"]["name"],
        "content": content,
    }


def message_text(message: Message) -> str:
    """Return the text of the policy's message, without its reasoning where the chat format marks that."""
    return message.get("content") or ""


def _arguments_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or of a class's `__init__`; none if Python cannot tell."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function has a parameter for."""
    parameters = _arguments_of(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def seed_generators(seed: int) -> None:
    """Seed the global generators, so that an environment that uses them starts alike each time."""
    random.seed(seed)
    numpy_random.seed(seed % 2**32)


def _seeded(seed: int) -> int:
    seed %= _SEEDS
    seed_generators(seed)
    return seed


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def opening(question: str, observation: str, tools: Sequence[Tool] = ()) -> Opening:
    """Return an opening of one message: the prompt's question, if there is any, before the observation."""
    return Opening([_user("\n\n".join(filter(None, (question, observation))))], tools)


def _text(value: Any, method: str) -> str:
    if isinstance(value, list) and all(isinstance(part, Mapping) and "text" in part for part in value):
        value = "".join(part["text"] for part in value)  # the parts of a chat message
    if not isinstance(value, str):
        raise TypeError(f"{method} returned {type(value).__name__} {value!r}; an observation must be text")
    return value


def _parts(value: Any, method: str, names: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list) or len(value) != len(names.split(", ")):
        raise TypeError(f"{method}() returned {value!r}, expected ({names})")
    return tuple(value)


_LOOKED_FOR = (
    "reset, step, score and close (ours); init and step (SkyRL-Gym); run_episode and serving (verifiers); "
    "reset, step and get_observation (TextArena); reset with a parameter seed, and step (Gym, GEM); or reset "
    "and methods that are tools (TRL)"
)


def load_environment(target: str, rewards: Sequence[str] = ()) -> Callable[[], Environment]:
    """Return a function that makes an environment, one for each episode. Both raise ConfigError if there is
    no such thing, its arguments are unknown, or no framework has its methods: what a user's function makes
    is not known before it is called.

    Args:
        target: import path of a class, or of a function that returns an environment; or openenv://HOST:PORT.
        rewards: --environment-reward, import paths of TRL's reward functions.
    """
    functions = load_reward_functions(rewards)
    if "://" in target:
        _refuse_rewards(target, functions, "a server")
        from megatron_ibpo.environments.openenv import OpenEnvironment  # others need no websockets

        OpenEnvironment(target)  # refuses what names no server
        return partial(OpenEnvironment, target)
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
    arguments = _arguments_of(factory)
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
    import transformers.utils  # noqa: F401 (for `trl_tools`, here once; in each episode it would take a second)

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
    """Return a function that wraps a factory of environments in this project's protocol. An `environment` of
    this kind is looked at, if there is one already: wrappers may have methods that classes lack."""
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
            has_methods("reset", "step") and "seed" in _arguments_of(candidate.reset),
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
