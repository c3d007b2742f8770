"""Compare-and-correct at test time, the paper's GSPO+Prompt: some of the samples go in, one answer comes out.

Nothing here can see a reward or a label: what is shown is drawn before anything is scored, uniformly.
Training's rule, which shows a wrong response beside a correct one, would tell the policy what it got wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_ibpo.records import Prompt, Sample, SampleRequest, TokenIds
from megatron_ibpo.seeds import derive_seed

__all__ = ["Corrector", "Generate", "corrected_answers"]

Generate = Callable[[list[SampleRequest]], list[Sample]]
"""Samples in the order of the requests."""


@dataclass(frozen=True)
class Corrector:
    """How solutions are corrected at test time."""

    prompt_ids: Callable[[Prompt, Sequence[Sample]], TokenIds]
    """(prompt, candidate solutions) → x̃."""
    num_candidates: int
    """K: how many of a prompt's samples are shown."""
    max_context: int
    """Tokens that x̃ and the correction may have together."""


def corrected_answers(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Sample]],
    sample: Generate,
    corrector: Corrector,
    like: SampleRequest,
    seed: int,
) -> list[tuple[Sample, bool]]:
    """(answer, whether it is a correction) to each prompt. Where x̃ leaves no room for a correction, the first
    candidate stands for it as it is.

    Args:
        sampled: the samples of each prompt, at least num_candidates.
        like: a request whose length, temperature, top-p and top-k corrections share.
    """
    shown = [_draw(*pair, corrector, seed) for pair in zip(prompts, sampled, strict=True)]
    asked = [corrector.prompt_ids(*pair) for pair in zip(prompts, shown, strict=True)]
    fits = [len(prompt_ids) + like.max_tokens <= corrector.max_context for prompt_ids in asked]
    requests = [
        replace(
            like,
            prompt_token_ids=prompt_ids,
            seed=derive_seed("test-time correction", seed, prompt.index),
        )
        for prompt, prompt_ids, fit in zip(prompts, asked, fits, strict=True)
        if fit
    ]
    corrections = iter(sample(requests) if requests else [])
    return [
        (next(corrections) if fit else candidates[0], fit)
        for candidates, fit in zip(shown, fits, strict=True)
    ]


def _draw(prompt: Prompt, responses: Sequence[Sample], corrector: Corrector, seed: int) -> list[Sample]:
    rng = random.Random(derive_seed("test-time pair", seed, prompt.index))
    return rng.sample(list(responses), corrector.num_candidates)
