"""Environments on an OpenEnv server, over its WebSocket: JSON messages reset, step, mcp and close (OpenEnv
0.3 to 0.10). The package openenv is not needed."""

import contextlib
import json
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.config import ConfigError, nearest
from megatron_ibpo.environments.frameworks import FLAG, message_text, opening, tool_answer
from megatron_ibpo.environments.protocol import EpisodeFaultError, Message, Opening, Tool, Turn

_FORM = "openenv://HOST:PORT[/path][?action_field=NAME&observation_field=NAME]"
_SECONDS_TO_CONNECT = 10
_SECONDS_TO_CLOSE = 2
_LARGEST_MESSAGE = 100 * 2**20
"""Largest message in bytes; OpenEnv's own client has the same limit."""
_LARGEST_SEED = 2**31
_LONGEST_TEXT = 500
"""Characters of what a server says that a message shows."""
_NO_TOOLS = ("does not support MCP", "UNKNOWN_TYPE")
"""Answers of servers without tools, now and before they knew the message mcp."""
_NO_STATE = "EXECUTION_ERROR"
"""Answer of an environment that has no state before its reset."""


def check_server(target: str, seconds: float) -> None:
    """Open a session on the server and close it again, before work starts. Raises ConfigError if no OpenEnv
    server is there, or it opens no session within these seconds (--step-timeout)."""
    session = OpenEnvironment(target)
    try:
        session.check(seconds)
    except EpisodeFaultError as error:
        hint = "an OpenEnv server must run there and have a session free"
        raise ConfigError(f"{FLAG} {error}; {hint}") from None
    finally:
        session.close()


class OpenEnvironment:
    """An episode on a server, over a connection of its own.

    If the server lists tools, the policy calls them, and a message without a call ends the episode. Otherwise
    each message is an action. The score is the sum of rewards. Where the server cannot be reached, breaks the
    connection or answers with an error, methods raise EpisodeFaultError of the kind `wire`."""

    def __init__(self, target: str) -> None:
        """Take the server that openenv://HOST:PORT names; raise ConfigError if it has another form."""
        address = urlsplit(target)
        settings = dict(parse_qsl(address.query, keep_blank_values=True))
        setting_names = ("action_field", "observation_field")
        if unknown := [name for name in settings if name not in setting_names]:
            hint = nearest(unknown[0], setting_names)
            raise ConfigError(f"{FLAG} {target}: unknown setting {unknown[0]!r}{hint}")
        try:
            complete = address.scheme == "openenv" and address.hostname and address.port
        except ValueError:  # a port that is no number
            complete = False
        if not complete or not all(settings.values()):
            raise ConfigError(f"{FLAG} {target}: expected an import path, or {_FORM}")
        self._target, self._url = target, f"ws://{address.netloc}{address.path.rstrip('/')}/ws"
        self._action_field = settings.get("action_field", "message")  # as in OpenEnv's echo environment
        self._observation_field = settings.get("observation_field")
        """Field that is shown to the policy. None: the only one but `metadata`, or all others as JSON."""
        self._connection = contextlib.ExitStack()
        self._socket: ClientConnection | None = None
        self._total = 0.0
        self._rewards = 0
        self._done = False

    def reset(self, question: str, label: str, metadata: Mapping[str, Any], seed: int) -> Opening:
        """Connect and reset. The server gets the seed, an episode id, and the prompt's question, label and
        metadata; it passes on those that the environment accepts."""
        self._connect()
        ids = {"seed": seed % _LARGEST_SEED, "episode_id": str(uuid.uuid4())}
        observation = self._observation("reset", {**metadata, "question": question, "label": label, **ids})
        if self._done:
            raise self._fault("the server ended the episode before its first step")
        return opening(question, self._text(observation), self._tools())

    def step(self, message: Message) -> Turn:
        """Act: call the tools that the message calls, or send its text."""
        if self._has_tools:
            calls = message.get("tool_calls") or []
            tool_messages = [self._call(call) for call in calls if not self._done]
            return Turn(tool_messages, done=self._done or not calls)
        observation = self._observation("step", {self._action_field: message_text(message)})
        return Turn([{"role": "user", "content": self._text(observation)}], self._done)

    def score(self) -> float:
        """Return the sum of rewards. An episode that the server ended without any has none."""
        if self._done and not self._rewards:
            raise self._fault("the server ended the episode and gave no reward")
        return self._total

    def close(self) -> None:
        """End the session on the server, which may be gone."""
        with contextlib.suppress(OSError, WebSocketException), self._connection:
            if self._socket is not None:
                self._socket.send(json.dumps({"type": "close"}))

    def check(self, seconds: float) -> None:
        """Connect, and ask for the state, which an OpenEnv server answers before a reset too. Raises
        EpisodeFaultError if something else is there, or does not answer within this time."""
        self._connect()
        try:
            self._ask("state", seconds=seconds)
        except EpisodeFaultError as error:
            if _NO_STATE not in str(error):
                raise

    def _connect(self) -> None:
        try:
            connection = connect(
                self._url,
                open_timeout=_SECONDS_TO_CONNECT,
                close_timeout=_SECONDS_TO_CLOSE,
                max_size=_LARGEST_MESSAGE,
                proxy=None,
            )
            self._socket = self._connection.enter_context(connection)
        except (OSError, WebSocketException) as error:
            raise self._fault(f"cannot be reached: {error}") from error

    def _tools(self) -> list[Tool]:
        request = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        try:
            answer = self._ask("mcp", request)
            if "error" in answer:
                raise self._fault(str(answer["error"].get("message")))
        except EpisodeFaultError as error:
            if not any(text in str(error) for text in _NO_TOOLS):
                raise
            answer = {"result": {"tools": []}}
        tools = [
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or {"type": "object"},
            }
            for tool in answer["result"]["tools"]
        ]
        self._has_tools = bool(tools)
        return tools

    def _call(self, call: Mapping[str, Any]) -> Message:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not isinstance(arguments, Mapping):
            return tool_answer(call, str({"error": f"the arguments of {name} must be an object"}))
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        observation = self._observation("step", action)
        error = observation.get("error")
        if error and error.get("error_type") == "transport_error":
            raise self._fault(f"tool {name}: {error.get('message')}")
        if error:
            return tool_answer(call, str({"error": error.get("message")}))
        return tool_answer(call, _result_text(observation.get("result")))

    def _observation(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Ask, add the reward of the answer, and return its observation."""
        answer = self._ask(kind, data)
        if not isinstance(answer.get("observation"), dict):
            raise self._fault(f"expected an observation, got {answer!r}")
        if answer.get("reward") is not None:
            self._total += read_reward(answer["reward"])[0]
            self._rewards += 1
        self._done = bool(answer.get("done"))
        return answer["observation"]

    def _text(self, observation: Mapping[str, Any]) -> str:
        field = self._observation_field
        if field is not None and field not in observation:
            raise self._fault(f"an observation has no field {field!r}{nearest(field, observation)}")
        content: Any = {name: value for name, value in observation.items() if name != "metadata"}
        if field is not None or len(content) <= 1:
            content = observation[field] if field is not None else next(iter(content.values()), "")
        return content if isinstance(content, str) else json.dumps(content)

    def _ask(
        self, kind: str, data: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> dict[str, Any]:
        """Send a message and return the data of the answer. In an episode --step-timeout ends the process."""
        assert self._socket is not None, "reset comes first"
        request = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            with contextlib.suppress(ConnectionClosed):  # it may have said why
                self._socket.send(json.dumps(request))
            answer = json.loads(self._socket.recv(seconds))
            answer_data = dict(answer["data"])
            if answer["type"] != "error":
                return answer_data
        except (OSError, WebSocketException) as error:
            raise self._fault(f"the connection broke: {error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._fault(f"expected JSON with type and data: {type(error).__name__}: {error}") from error
        raise self._fault(f"{answer_data.get('code')}: {answer_data.get('message')}")

    def _fault(self, text: str) -> EpisodeFaultError:
        return EpisodeFaultError("wire", f"{self._target}: {' '.join(text[:_LONGEST_TEXT].split())}")


def _result_text(result: Any) -> str:
    """Return the text of a tool's result: as MCP servers write it, or JSON."""
    if isinstance(result, Mapping) and result.get("data") is not None:
        result = result["data"]
    elif isinstance(result, Mapping) and isinstance(result.get("content"), list):
        result = "\n".join(block["text"] for block in result["content"] if block.get("type") == "text")
    return result if isinstance(result, str) else json.dumps(result)
