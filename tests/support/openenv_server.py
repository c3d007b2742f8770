"""A server that speaks OpenEnv's published wire, and what an environment needs of its package."""

import json
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from types import SimpleNamespace

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

Action = SimpleNamespace  # whose fields are those of the message


class Observation(SimpleNamespace):
    def __init__(self, reward=None, done=False, **fields):
        super().__init__(reward=reward, done=done, **fields)


class BreaksTheConnection(BaseException):
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
