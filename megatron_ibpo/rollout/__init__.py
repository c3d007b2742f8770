"""Sampling by vLLM, in processes of its own."""

from __future__ import annotations

from megatron_ibpo.rollout.engine import Engine
from megatron_ibpo.rollout.protocol import AsyncEngine, EngineDiedError, EngineError, EngineStartError

__all__ = ["AsyncEngine", "Engine", "EngineDiedError", "EngineError", "EngineStartError"]
