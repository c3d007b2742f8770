"""Scoring samples as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from megatron_ibpo.records import Prompt, Sample, TokenIds
from megatron_ibpo.rewards import Verifier

__all__ = ["Score", "scorer"]

Score = Callable[[Prompt, Sample], Awaitable[None]]
"""Fills in `reward`, `correct` and `reward_error` of a sample of the prompt."""


def scorer(verifier: Verifier, decode: Callable[[TokenIds], str]) -> Score:
    """Asks the verifier about every sample that is not scored yet."""

    async def score(prompt: Prompt, sample: Sample) -> None:
        if sample.is_scored:
            return
        judged = await verifier.score_one(prompt, decode(sample.token_ids))
        sample.reward, sample.correct, sample.reward_error = judged.reward, judged.correct, judged.error

    return score
