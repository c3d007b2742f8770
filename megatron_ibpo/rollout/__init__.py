"""Sampling by vLLM, in processes of its own."""

from __future__ import annotations

from megatron_ibpo.rollout.engine import Engine, EngineDiedError, EngineError, EngineStartError
from megatron_ibpo.rollout.pool import EnginePool

__all__ = ["Engine", "EngineDiedError", "EngineError", "EnginePool", "EngineStartError"]
