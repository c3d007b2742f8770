"""The seam between credit and a comparison operator.

An operator looks at the scored groups of a step and says, for every response, how near it was to being
right: φ in [0, 1], 0 for correct ones; and, if it can, which of its tokens to learn from. If it needs more
rollouts or log-probs it asks the loop for them. Compare-and-correct (`corrections.py`) is one, `agreement.py`
another; anything that is sensitive to counterfactual differences can be one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_ibpo.config import AlgorithmConfig, RolloutConfig
from megatron_ibpo.credit.shown import ThinkingMarks
from megatron_ibpo.records import Group, Prompt, Response, SampleRequest, TrainSequence

__all__ = [
    "CorrectionPrompt",
    "Judgement",
    "LogProbQuery",
    "LogProbs",
    "LoopAccess",
    "Operator",
    "Sample",
    "Score",
    "TokenTexts",
    "TokenWeights",
    "Values",
    "lent",
    "no_operator",
]

Sample = Callable[[list[SampleRequest]], list[Response]]
"""Responses in the order of the requests."""
Score = Callable[[list[tuple[Prompt, Response]]], None]
"""Fills in `reward`, `correct` and `reward_error` of each response."""
CorrectionPrompt = Callable[[Prompt, Sequence[int], Sequence[Sequence[int]]], tuple[int, ...]]
"""Token ids of x̃ from the prompt, the wrong response and the references, all without end-of-sequence ids."""
TokenTexts = Callable[[Sequence[int]], list[str]]
"""The text of each token."""


@dataclass(frozen=True)
class LogProbQuery:
    """How likely is this continuation?"""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    temperature: float


LogProbs = Callable[[list[LogProbQuery]], list[tuple[float, ...]]]
"""Log-prob of each token of the continuations under the present policy."""
Values = Callable[[list[TrainSequence]], list[tuple[float, ...]]]
"""The critic's value before each response token."""
TokenWeights = tuple[float, ...] | None
"""Factors on the gradient of each token of a response, end-of-sequence id included; None: all ones."""

T = TypeVar("T")


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
    token_texts: TokenTexts | None = None
    thinking: ThinkingMarks | None = None
    """What <think> and </think> are in this vocabulary."""
    logprobs: LogProbs | None = None
    placeholder_id: int | None = None
    """Stands for a token that is masked."""


@dataclass(frozen=True)
class Judgement:
    """What an operator found."""

    phi: list[list[float]]
    """φ of every response of every group, in [0, 1]."""
    token_weights: list[list[TokenWeights]] | None = None
    """Of every response of every group; None: all ones."""
    metrics: dict[str, float] = field(default_factory=dict)


Operator = Callable[[Sequence[Group], AlgorithmConfig, LoopAccess], Judgement]


def no_operator(groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess) -> Judgement:
    """φ = 0 everywhere: group-relative credit alone."""
    return Judgement([[0.0] * len(group.responses) for group in groups])


def lent(tool: T | None, what: str) -> T:
    """The tool, which this algorithm needs.

    Raises:
        ValueError: the loop did not lend it.
    """
    if tool is None:
        raise ValueError(f"this algorithm needs {what}, which the loop did not lend to credit")
    return tool
