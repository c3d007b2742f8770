"""Scoring responses: rewards by name or by import path, always in processes that can be killed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.config import DataConfig, is_import_path, nearest
from megatron_ibpo.records import Prompt
from megatron_ibpo.rewards.workers import WorkerPool

__all__ = ["VERIFIERS", "Score", "Verifier", "open_verifier"]

VERIFIERS = {
    "reasoning_gym": "megatron_ibpo.rewards.reasoning_gym:score",
    "math": "megatron_ibpo.rewards.math:score",
}
"""--rm-type → where its function is."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """What a verifier said of one response."""

    reward: float | None
    """None: the verifier failed. That is not a reward of 0."""
    correct: bool
    """The reward has reached the threshold."""
    error: str | None = None
    """How the verifier failed."""


class Verifier:
    """Scores responses by a function (prompt text, response text, label, metadata) -> number."""

    def __init__(self, target: str, *, threshold: float, timeout: float, workers: int):
        """
        Args:
            target: package.module:function.
            threshold: smallest reward of a correct response.
            timeout: seconds for one response.

        Raises:
            WorkerError: the function cannot be loaded.
        """
        self._target = target
        self._threshold = threshold
        self._pool = WorkerPool(target, size=workers, timeout=timeout)

    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """Score each response text to its prompt, in order.

        A function that raises, hangs, kills its process or returns what is no finite number gives a score
        without a reward. The first such error of a call is logged.
        """
        outcomes = self._pool.call([(p.text, response, p.label, p.metadata) for p, response in pairs])
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            _log.warning(
                "%s failed on %d of %d responses; the first: %s",
                self._target,
                len(errors),
                len(outcomes),
                errors[0],
            )
        return [
            Score(
                outcome.value,
                outcome.value is not None and outcome.value >= self._threshold,
                outcome.error,
            )
            for outcome in outcomes
        ]

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_verifier(data: DataConfig) -> Verifier:
    """The verifier that `data.rm_type` names: reasoning_gym, math, or package.module:function.

    Raises:
        ValueError: an unknown name (with the nearest), or a function that cannot be loaded.
    """
    target = VERIFIERS.get(data.rm_type, data.rm_type)
    if not is_import_path(target):
        hint = nearest(data.rm_type, VERIFIERS)
        raise ValueError(
            f"--rm-type {data.rm_type}: no such verifier; there are {', '.join(VERIFIERS)}, or give an "
            f"import path package.module:function{hint}"
        )
    return Verifier(
        target, threshold=data.reward_threshold, timeout=data.reward_timeout, workers=data.reward_workers
    )
