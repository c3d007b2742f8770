"""One short episode of an environment before a run starts."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_ibpo.config import ConfigError
from megatron_ibpo.environments.processes import EnvironmentPool
from megatron_ibpo.environments.protocol import EpisodeFaultError


def try_environment(
    pool: EnvironmentPool, target: str, question: str, label: str, metadata: Mapping[str, Any], place: str
) -> dict[str, float]:
    """Play one turn of an environment with a made-up message, and have it scored. Nothing is counted. A
    server's environment is not played: `EnvironmentPool.check` has opened a session there.

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
        await session.step({"role": "assistant", "content": f"The answer is {label[:200]}."})
        return (await session.score()).details
    finally:
        await session.close()
