"""Verifiers: the only source of rewards."""

from megatron_ibpo.rewards.answers import answer_extractor
from megatron_ibpo.rewards.verifier import VERIFIERS, Score, Verifier, open_verifier
from megatron_ibpo.rewards.workers import WorkerError

__all__ = ["VERIFIERS", "Score", "Verifier", "WorkerError", "answer_extractor", "open_verifier"]
