"""Sampling: engines behind one protocol, most of them in processes of their own."""

from megatron_ibpo.engines.protocol import (
    AsyncEngine,
    EngineDiedError,
    EngineError,
    EngineLostError,
    EngineStartError,
    ThreadedEngine,
)
from megatron_ibpo.engines.vllm.engine import Engine

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineDiedError",
    "EngineError",
    "EngineLostError",
    "EngineStartError",
    "ThreadedEngine",
]
