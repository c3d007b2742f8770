"""The environments of docs/environments_compared.md, stand-ins for the frameworks that they import, policies
that play them, and a server that speaks OpenEnv's published wire."""

import json
import random
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from support.documented_modules import DOCS, write_modules


def write_compared_environments(directory):
    write_modules(directory, [DOCS / "environments_compared.md"], 7)


def stand_ins():
    kinds = SimpleNamespace(GAME_MESSAGE="message")
    openenv = {"create_app": create_app, "Action": Action, "Observation": Observation}
    return {
        **_package("skyrl_gym.envs.base_text_env", BaseTextEnv=BaseTextEnv, BaseTextEnvStepOutput=dict),
        **_package("gem", Env=GemEnv),
        **_package("textarena", Env=TextArenaEnv, SinglePlayerState=SinglePlayerState, ObservationType=kinds),
        **_package("openenv.core.env_server", Environment=object, State=dict, **openenv),
    }


def _package(name, **members):
    modules = {parent: ModuleType(parent) for parent in accumulate(name.split("."), "{}.{}".format)}
    vars(modules[name]).update(members)
    return modules


class BaseTextEnv:
    close = get_metrics = lambda self: {}


class GemEnv:
    def reset(self, seed=None):
        random.seed(seed)


class SinglePlayerState:
    def __init__(self, num_players, seed=None, max_turns=None):
        assert num_players == 1
        random.seed(seed)

    def reset(self, game_state, player_prompt_function):
        self.observations = [(-1, player_prompt_function(player_id=0, game_state=game_state), "prompt")]
        self.done, self.rewards = False, None

    def add_observation(self, message, observation_type, from_id=-1):
        self.observations.append((from_id, message, observation_type))

    def set_outcome(self, reward, reason):
        self.done, self.rewards = True, {0: reward}

    def step(self):
        return self.done, {}


class TextArenaEnv:
    state: Any

    def get_observation(self):
        shown, self.state.observations = self.state.observations, []
        return 0, shown

    def close(self):
        return self.state.rewards, {}


def say(text):
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_0", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def guess_number(environment, seed):
    """Play a game of guessing a number by halving what is left, as an episode does."""
    opening = environment.reset("", "", {}, seed)
    low, high, guesses = 1, 20, []
    while True:
        guesses.append(guess := (low + high) // 2)
        turn = environment.step(call("guess", number=guess) if opening.tools else say(str(guess)))
        told = turn.messages[-1]["content"].lower() if turn.messages else ""
        if turn.done or "right" in told:
            break
        assert ("higher" in told) != ("lower" in told), told
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    if not turn.done:
        assert environment.step(say("Done.")).done
    score = environment.score()
    environment.close()
    return guesses, score


class Action(SimpleNamespace):
    """An action: its fields are those of the message."""


class Observation(SimpleNamespace):
    def __init__(self, reward=None, done=False, **fields):
        super().__init__(reward=reward, done=done, **fields)


class BreaksTheConnection(Exception):
    """Raised by an environment to have the server hang up."""


def create_app(environment, action=Action, observation=Observation, **settings):
    """Return what `serving` takes: OpenEnv's function of this name makes a web application of the same."""
    return environment, action


def serving(app):
    return serving_connections(partial(_session, *app))


@contextmanager
def serving_connections(answer):
    with serve(answer, "127.0.0.1", 0) as server:  # which shuts down at the end
        Thread(target=server.serve_forever).start()
        yield f"openenv://127.0.0.1:{server.socket.getsockname()[1]}"


def _session(make, action, socket):
    try:
        environment = make()
    except Exception as error:
        socket.send(_error(error, "FACTORY_ERROR"))
        return
    with suppress(ConnectionClosed, BreaksTheConnection):
        for message in map(json.loads, socket):
            if message["type"] == "close":
                break
            try:
                kind, data = _answer(environment, action, message["type"], message.get("data"))
                answer = json.dumps({"type": kind, "data": data})
            except BreaksTheConnection:
                raise
            except Exception as error:
                answer = _error(error, "EXECUTION_ERROR")
            socket.send(answer)


def _error(error, code):
    return json.dumps({"type": "error", "data": {"message": str(error), "code": code}})


def _answer(environment, action, kind, data):
    if kind == "state":
        return "state", {}
    if kind == "mcp":
        answer = {"error": {"code": -32603, "message": "Environment does not support MCP"}}
        if hasattr(environment, "tools"):
            answer = {"result": {"tools": environment.tools}}
        return "mcp", {"id": data["id"]} | answer
    fields = vars(environment.reset(**data) if kind == "reset" else environment.step(action(**data)))
    shown = {name: value for name, value in fields.items() if name not in ("reward", "done")}
    return "observation", {"observation": shown, "reward": fields["reward"], "done": fields["done"]}
