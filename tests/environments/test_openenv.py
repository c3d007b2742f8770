"""Environments on a server that speaks OpenEnv's wire."""

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from megatron_ibpo.config import ConfigError, EnvironmentConfig
from megatron_ibpo.environments.adapters import load_environment
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.environments.protocol import EpisodeFaultError
from support.openenv_server import BreaksTheConnection, Observation, create_app, serving, serving_connections
from support.players import call, say


class Coding:
    """Runs a program, in a field of its own; one field or several come back."""

    def reset(self, question, label, seed, episode_id, difficulty=0):
        return Observation(output=f"{question} {label} {seed} {difficulty}")

    def step(self, action):
        return Observation(output=action.code.upper(), exit_code=0, metadata={"t": 1}, reward=0.5)


def content(turn):
    [message] = turn.messages
    return message["content"]


def test_text_goes_into_the_named_field_and_what_comes_back_or_one_field_of_it_is_shown():
    with serving(create_app(Coding)) as server, EnvironmentPool(EnvironmentConfig()) as pool:
        pool.check(server)  # which resets nothing
        environment = load_environment(f"{server}?action_field=code")()
        opening = environment.reset("Print.", "a", {"difficulty": 2}, 2**31 + 5)
        assert opening.messages == [{"role": "user", "content": "Print.\n\nPrint. a 5 2"}]
        turn = environment.step(say("print"))
        assert turn.messages == [{"role": "user", "content": '{"output": "PRINT", "exit_code": 0}'}]
        environment.step(say("print"))
        assert environment.score() == 1.0
        environment.close()
        environment = load_environment(f"{server}?action_field=code&observation_field=output")()
        assert content(environment.reset("", "b", {}, 0)) == " b 0 0"
        assert content(environment.step(say("print"))) == "PRINT"
        environment.close()
        environment = load_environment(f"{server}?observation_field=stdout")()
        with pytest.raises(EpisodeFaultError, match="an observation has no field 'stdout'"):
            environment.reset("", "", {}, 0)
        environment.close()


class Tools:
    """An environment whose actions are calls of tools, as OpenEnv's MCP environments."""

    tools = ({"name": "add", "description": "Add.", "inputSchema": {"type": "object"}},)

    def reset(self, **row):
        return Observation()

    def step(self, action):
        assert action.type == "call_tool"
        name, error = action.tool_name, None
        if name != "add":
            error = {"error_type": "tool_not_found", "message": f"Unknown tool: {name}"}
        elif action.arguments["a"] < 0:
            error = {"error_type": "transport_error", "message": "the tools' server is gone"}
        if error is not None:
            return Observation(tool_name=name, result=None, error=error)
        result = {"content": [{"type": "text", "text": "3"}], "data": action.arguments["a"] + 1}
        return Observation(tool_name="add", result=result, error=None, reward=1.0)


def test_the_policy_calls_the_tools_of_a_server():
    with serving(create_app(Tools)) as server:
        environment = load_environment(server)()
        opening = environment.reset("Add.", "", {}, 0)
        assert content(opening) == "Add."
        assert opening.tools == [{"name": "add", "description": "Add.", "parameters": {"type": "object"}}]
        [answer] = environment.step(call("add", a=2)).messages
        assert answer == {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"}
        assert content(environment.step(call("multiply", a=2))) == "{'error': 'Unknown tool: multiply'}"
        assert environment.step(say("3")).done
        assert environment.score() == 1.0
        with pytest.raises(EpisodeFaultError, match="the tools' server is gone") as fault:
            environment.step(call("add", a=-1))
        assert fault.value.kind == "wire"
        environment.close()


class Fails:
    """An environment that fails in the way that the policy says."""

    def reset(self, **row):
        return Observation(message="How?")

    def step(self, action):
        if action.message == "hang up":
            raise BreaksTheConnection
        if action.message == "raise":
            raise RuntimeError("no such move")
        return Observation(message="Over.", done=True)


def play(environment, move):
    environment.step(say(move))
    return environment.score()


def test_what_fails_on_the_wire_is_a_fault_and_never_a_reward():
    for how, problem in (
        ("hang up", "the connection broke"),
        ("raise", "EXECUTION_ERROR: no such move"),
        ("end", "gave no reward"),
    ):
        with serving(create_app(Fails)) as server:
            environment = load_environment(server)()
            environment.reset("", "", {}, 0)
            with pytest.raises(EpisodeFaultError, match=problem) as fault:
                play(environment, how)
            assert fault.value.kind == "wire"
            assert server in str(fault.value)
            environment.close()
        gone = load_environment(server)()
        with pytest.raises(EpisodeFaultError, match="cannot be reached") as fault:
            gone.reset("", "", {}, 0)
        assert fault.value.kind == "wire"
        gone.close()


@contextmanager
def nothing():
    with serving(create_app(Fails)) as server:
        pass
    yield server


def shout(socket):
    for text in socket:
        socket.send(text.upper())


@contextmanager
def http():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        Thread(target=server.handle_request).start()
        yield f"openenv://127.0.0.1:{server.server_port}"


def test_a_server_that_opens_no_session_is_found_before_work_starts():
    for server, problem in (
        (nothing, "cannot be reached: .*refused"),
        (http, "cannot be reached: .*HTTP"),
        (lambda: serving_connections(shout), "expected JSON with type and data"),
        (lambda: serving(create_app(lambda: {}["game"])), "FACTORY_ERROR: 'game'"),
    ):
        with server() as target, EnvironmentPool(EnvironmentConfig()) as pool:
            with pytest.raises(ConfigError, match=problem) as refusal:
                pool.check(target)
            assert str(refusal.value).startswith(f"--environment {target}: ")
            assert "\n" not in str(refusal.value)
