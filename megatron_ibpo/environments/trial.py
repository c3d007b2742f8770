"""One short episode of an environment before a run starts."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_ibpo.config import ConfigError
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.environments.protocol import EpisodeFaultError, Message, Tool

_VALUES = {"integer": 1, "number": 1.0, "boolean": True, "array": list[Any](), "object": dict[str, Any]()}
"""Made-up arguments by their JSON type; text is the label."""


def try_environment(
    pool: EnvironmentPool, target: str, question: str, label: str, metadata: Mapping[str, Any], place: str
) -> dict[str, float]:
    """Play an environment with made-up messages, a call of its first tool if it has any and then an answer,
    and have it scored. Nothing is counted. A server's environment is not played: `EnvironmentPool.check` has
    opened a session there.

    Args:
        place: the prompt's, for messages.

    Returns:
        the further numbers that the environment gave with the reward.

    Raises:
        ConfigError: a method raises, takes longer than --step-timeout, or returns what it must
            not; names its line.
    """
    if "://" in target:
        return {}
    faults, opened = Counter(pool.faults), pool.opened
    try:
        return asyncio.run(_played(pool, target, question, label, metadata))
    except EpisodeFaultError as fault:
        raise ConfigError(
            f"--environment {target}: {fault} on {place}, with a made-up message; the run has not started"
        ) from None
    finally:
        pool.faults, pool.opened = faults, opened


async def _played(
    pool: EnvironmentPool, target: str, question: str, label: str, metadata: Mapping[str, Any]
) -> dict[str, float]:
    session = await pool.open(target, question, label, metadata, seed=0)
    try:
        answer = {"role": "assistant", "content": f"The answer is {label[:200]}."}
        tools = session.opening.tools
        for message in [*([_call(tools[0], label)] if tools else []), answer]:
            if (await session.step(message)).done:
                break
        return (await session.score()).details
    finally:
        await session.close()


def _call(tool: Tool, label: str) -> Message:
    """Return a message that calls the tool with made-up values of all arguments that it requires."""
    parameters = tool["parameters"]
    schemas = {
        name: parameters.get("properties", {}).get(name, {}) for name in parameters.get("required", ())
    }
    arguments = {
        name: schema["enum"][0] if schema.get("enum") else _VALUES.get(str(schema.get("type")), label[:200])
        for name, schema in schemas.items()
    }
    call = {"id": "call_0", "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
