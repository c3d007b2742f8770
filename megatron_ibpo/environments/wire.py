"""The lines of JSON that an episode's process and its owner send each other.

The owner writes [method, [arguments]]. The process answers ["answer", value] or ["fault", kind, text]. It
runs code of others, so its owner unpickles nothing and checks every answer. When the process has died, the
zygote ends its output with a NUL byte, which JSON never has, and the reason.
"""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, get_args

from megatron_ibpo.basics.reward_value import read_reward
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import shown
from megatron_ibpo.environments.protocol import EpisodeFaultError, EpisodeScore, FaultKind, Opening, Turn

LARGEST_MESSAGE = 16 << 20
"""Bytes of one line. 16 MiB: far more than a conversation holds."""
DEATH = b"\0"
"""Mark before the reason why the process has died."""
_LONGEST_TEXT = 1000
"""Characters of a fault's text."""


def line(*parts: Any) -> bytes:
    """Return the line of a message.

    Raises:
        TypeError, ValueError: a part is not JSON, or the line is too long.
    """
    try:
        text = json.dumps(parts, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("its brackets nest too deep") from None
    if len(text) >= LARGEST_MESSAGE:
        raise ValueError(f"{len(text):,} bytes, and at most {LARGEST_MESSAGE:,} can be sent")
    return text.encode() + b"\n"


def answer_in(received: bytes) -> Any:
    """Return the value of an answer.

    Raises:
        EpisodeFaultError: it is a fault, the process has died, or it wrote something else.
    """
    _, died, exit_reason = received.rpartition(DEATH)
    if died:
        raise EpisodeFaultError("death", f"its process died ({exit_reason.decode(errors='replace').strip()})")
    try:
        answer = read_json(received)
    except ValueError as error:
        raise EpisodeFaultError("error", f"its process wrote an unreadable answer: {error}") from None
    match answer:
        case ["answer", value]:
            return value
        case ["fault", str(kind), str(text)] if kind in get_args(FaultKind):
            raise EpisodeFaultError(kind, text[:_LONGEST_TEXT])  # type: ignore[arg-type]
    raise EpisodeFaultError("error", f"its process wrote an unreadable answer: {shown(answer)}")


# ------------------------------------------------------------------------------------ in the process


def opening_value(opening: Any) -> dict[str, Any]:
    """Return the JSON of what `reset` returned.

    Raises:
        TypeError: it is not an Opening.
    """
    _check(opening, ("messages", "tools"), "reset", "Opening")
    return {"messages": list(opening.messages), "tools": list(opening.tools)}


def turn_value(turn: Any) -> dict[str, Any]:
    """Return the JSON of what `step` returned.

    Raises:
        TypeError: it is not a Turn.
    """
    _check(turn, ("messages", "done"), "step", "Turn")
    return {"messages": list(turn.messages), "done": bool(turn.done)}


def score_value(value: Any) -> dict[str, float]:
    """Return the JSON of what `score` returned. Rewards of single turns, `turns`, become the further numbers
    turn_1, turn_2, ….

    Raises:
        TypeError, ValueError: it is not a reward; says why.
    """
    if isinstance(value, Mapping) and "turns" in value and not isinstance(value["turns"], Real):
        value = dict(value)
        turns = value.pop("turns")
        if not isinstance(turns, list | tuple):
            raise TypeError(f"expected a list of numbers as 'turns', got {shown(turns)}")
        value |= {f"turn_{number}": reward for number, reward in enumerate(turns, start=1)}
    reward, details = read_reward(value)
    return {"score": reward, **details}


def _check(value: Any, fields: Sequence[str], method: str, name: str) -> None:
    if not all(hasattr(value, field) for field in fields):
        raise TypeError(f"{method} must return {name}({', '.join(fields)}), got {type(value).__name__}")


# ------------------------------------------------------------------------------------ in the owner


def opening_in(value: Any) -> Opening:
    """Return the opening that a process sent.

    Raises:
        ValueError: says what is wrong with it.
    """
    match value:
        case {"messages": [_, *_] as messages, "tools": list(tools)}:
            for tool in tools:
                match tool:
                    case {"name": str(), "parameters": {}}:
                        continue
                raise ValueError(f"a tool is {{name, description, parameters}}, got {shown(tool)}")
            return Opening(tuple(map(_message, messages)), tuple(tools))
    raise ValueError(f"an opening has at least one message, got {shown(value)}")


def turn_in(value: Any) -> Turn:
    """Return the turn that a process sent.

    Raises:
        ValueError: says what is wrong with it.
    """
    match value:
        case {"messages": list(messages), "done": bool(done)} if messages or done:
            return Turn(tuple(map(_message, messages)), done)
    raise ValueError(f"a turn that is not done has at least one message, got {shown(value)}")


def score_in(value: Any) -> EpisodeScore:
    """Return the score that a process sent.

    Raises:
        TypeError, ValueError: it is not a reward; says why.
    """
    return EpisodeScore(*read_reward(value))


def _message(value: Any) -> dict[str, Any]:
    match value:
        case {"role": str(), "content": str()} | {"role": "assistant", "tool_calls": [_, *_]}:
            return dict(value)
    raise ValueError(f"a message is {{role, content}} with the content as text, got {shown(value)}")


def request(method: str, arguments: Sequence[Any]) -> bytes:
    """Return the line that asks a process for a method's value.

    Raises:
        EpisodeFaultError: an argument cannot be sent.
    """
    try:
        return line(method, arguments)
    except (TypeError, ValueError) as error:
        raise EpisodeFaultError("error", f"its arguments cannot be sent: {error}") from None
