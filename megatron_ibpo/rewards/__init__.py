"""Verifiers: the only source of rewards."""

from megatron_ibpo.rewards.verifier import (
    Pool,
    Score,
    Verifier,
    answer_extractor,
    open_pool,
    open_verifier,
    reward_function,
)
from megatron_ibpo.rewards.workers import Outcome, WorkerError, WorkerPool

__all__ = [
    "Outcome",
    "Pool",
    "Score",
    "Verifier",
    "WorkerError",
    "WorkerPool",
    "answer_extractor",
    "open_pool",
    "open_verifier",
    "reward_function",
]
