"""Verifiers: the only source of rewards."""

from megatron_ibpo.rewards.answers import answer_extractor
from megatron_ibpo.rewards.verifier import Pool, Score, Verifier, open_pool, open_verifier, reward_function
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
