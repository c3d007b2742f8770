"""Sampling by vLLM, in processes of its own."""

from megatron_ibpo.rollout.engine import Engine
from megatron_ibpo.rollout.protocol import (
    AsyncEngine,
    EngineDiedError,
    EngineError,
    EngineLostError,
    EngineStartError,
)

__all__ = ["AsyncEngine", "Engine", "EngineDiedError", "EngineError", "EngineLostError", "EngineStartError"]
