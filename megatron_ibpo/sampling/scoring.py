"""Scoring of samples as they arrive."""

from collections.abc import Awaitable, Callable

from megatron_ibpo.basics.records import Prompt, Sample
from megatron_ibpo.rewards import Verifier

Score = Callable[[Prompt, Sample], Awaitable[None]]
"""Fills in `reward`, `correct`, `reward_error` and `reward_details` of a sample of the prompt."""


def scorer(verifier: Verifier, text: Callable[[Prompt, Sample], str]) -> Score:
    """Return a function that lets the verifier score samples that are not scored yet.

    Args:
        text: returns the text of a sample of the prompt for the verifier.
    """

    async def score(prompt: Prompt, sample: Sample) -> None:
        if sample.is_scored:
            return
        judged = await verifier.score_one(prompt, text(prompt, sample))
        sample.reward, sample.correct, sample.reward_error = judged.reward, judged.correct, judged.error
        sample.reward_details = judged.details

    return score
