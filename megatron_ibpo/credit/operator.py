"""The seam between credit and a comparison operator.

An operator looks at the scored groups of a step and says, for every response, how near it was to being
right: φ in [0, 1], 0 for correct ones. If it needs more rollouts it asks the loop for them.
Compare-and-correct (`corrections.py`) is one; anything that is sensitive to counterfactual differences can
be another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ibpo.config import AlgorithmConfig, RolloutConfig
from megatron_ibpo.records import Group, Prompt, Response, SampleRequest

__all__ = ["CorrectionPrompt", "Judgement", "LoopAccess", "Operator", "Sample", "Score", "no_operator"]

Sample = Callable[[list[SampleRequest]], list[Response]]
"""Responses in the order of the requests."""
Score = Callable[[list[tuple[Prompt, Response]]], None]
"""Fills in `reward`, `correct` and `reward_error` of each response."""
CorrectionPrompt = Callable[[Prompt, Sequence[int], Sequence[Sequence[int]]], tuple[int, ...]]
"""Token ids of x̃ from the prompt, the wrong response and the references, all without end-of-sequence ids."""


@dataclass(frozen=True)
class LoopAccess:
    """What the loop lends to an operator for one step."""

    sample: Sample
    score: Score
    correction_prompt: CorrectionPrompt
    rollout: RolloutConfig
    """Sampling of the responses; corrections are sampled alike."""
    max_context: int
    """Tokens that prompt and response may have together."""
    seed: int
    step: int


@dataclass(frozen=True)
class Judgement:
    """What an operator found."""

    phi: list[list[float]]
    """φ of every response of every group, in [0, 1]."""
    metrics: dict[str, float] = field(default_factory=dict)


Operator = Callable[[Sequence[Group], AlgorithmConfig, LoopAccess], Judgement]


def no_operator(groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess) -> Judgement:
    """φ = 0 everywhere: group-relative credit alone."""
    return Judgement([[0.0] * len(group.responses) for group in groups])
