"""The seam between credit and a comparison operator.

An operator looks at the scored groups of a step and says, for every response, how near it was to being
right: φ in [0, 1], 0 for correct ones; and, if it can, which of its tokens to learn from. It works in two
stages, so that sampling need not wait for the whole step: what more is to be sampled for a group is asked as
soon as that group is scored, and the step is judged when all its groups are there. Compare-and-correct
(`corrections.py`) is one, those of `examples/credit/` are others; anything that is sensitive to
counterfactual differences can be one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from megatron_ibpo.basics.records import (
    Correction,
    Floats,
    Group,
    Prompt,
    Sample,
    SampleRequest,
    TokenIds,
    TrainSequence,
    Weights,
)
from megatron_ibpo.config import AlgorithmConfig, Config, RolloutConfig
from megatron_ibpo.credit.compared_parts import ThinkingMarks
from megatron_ibpo.credit.estimators import Estimator

CorrectionPrompt = Callable[[Prompt, TokenIds, Sequence[TokenIds]], TokenIds]
"""Token ids of x̃ from the prompt, the wrong response and the references, all without end-of-sequence ids."""
AnswerStart = Callable[[Prompt, TokenIds], int | None]
"""Index of the token with which the final answer of a response to the prompt begins; None if it has none."""
TokenTexts = Callable[[TokenIds], list[str]]
"""The text of each token."""


@dataclass(frozen=True, eq=False)
class LogProbQuery:
    """How likely is this continuation?"""

    context: TokenIds
    continuation: TokenIds
    temperature: float


LogProbs = Callable[[list[LogProbQuery]], list[Floats]]
"""Log-prob of each token of the continuations under the present policy."""
Values = Callable[[list[TrainSequence]], list[Floats]]
"""The critic's value before each response token."""
TokenWeights = Weights | None
"""Factors on the gradient of each token of a response, end-of-sequence id included; None: all ones. What
stands at tokens that are not trained on (`Sample.loss_mask`) has no effect."""

Memory = Mapping[str, Any]
"""What an operator wants to know again at the next step, as JSON."""

T = TypeVar("T")


class SamplePrice(Protocol):
    """What a sample takes, in operations, as the run's meter counts them."""

    def __call__(self, prompt: int, response: int, *, sharing: int, trained: int) -> float:
        """
        Args:
            prompt, response: tokens that are read and written.
            sharing: samples for which the prompt is read once.
            trained: tokens of an update on it; 0 without one.
        """
        ...


@dataclass(frozen=True)
class Vocabulary:
    """What credit may need to know of tokens; one for the whole run."""

    correction_prompt: CorrectionPrompt
    token_texts: TokenTexts | None = None
    thinking: ThinkingMarks | None = None
    """What <think> and </think> are, for --ibpo-strip-thinking."""
    placeholder_id: int | None = None
    """Stands for a token that is masked."""
    answer_start: AnswerStart | None = None
    """None where the verifier does not say what an answer is; then nothing is said of leakage."""


@dataclass(frozen=True)
class CreditContext:
    """All that credit of one step depends on besides the groups."""

    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    """Sampling of the responses; corrections are sampled alike."""
    vocabulary: Vocabulary
    max_context: int
    """Tokens that prompt and response may have together."""
    seed: int
    step: int
    """With the seed and a prompt's index, what every draw depends on."""
    reward_threshold: float = 1.0
    """The smallest correct reward."""
    logprobs: LogProbs | None = None
    """Asks the policy."""
    values: Values | None = None
    """Asks the critic, for --advantages critic."""
    price: SamplePrice | None = None
    """Asks the run's meter."""
    memory: Memory = field(default_factory=dict)
    """What the operator wanted remembered of the step before (`Judgement.memory`)."""


@dataclass(frozen=True, eq=False)
class FollowUp:
    """One sample that an operator wants of a scored group."""

    target: int
    """Index in `Group.responses` of the response that it is to correct."""
    references: tuple[int, ...]
    """Indices in `Group.responses` of the solutions shown along with it, in drawn order."""
    request: SampleRequest


@dataclass(frozen=True)
class Judgement:
    """What an operator found."""

    phi: list[list[float]]
    """φ of every response of every group, in [0, 1]."""
    token_weights: list[list[TokenWeights]] | None = None
    """For every response of every group; None: all ones."""
    metrics: dict[str, float] = field(default_factory=dict)
    raised_token_weights: list[list[TokenWeights]] | None = None
    """In place of `token_weights` for responses whose advantage is above 0, which are made likelier; None:
    the same."""
    memory: Memory = field(default_factory=dict)
    """What the context of the next step is to have."""
    follow_up_estimator: Estimator | None = None
    """What the rewards of the samples that it asked for are relative to; None: as those of responses."""

    def weights_of(self, group: int, index: int, advantage: float | None) -> TokenWeights:
        """Token weights of a response that has this advantage."""
        raised = advantage is not None and advantage > 0 and self.raised_token_weights is not None
        weights = self.raised_token_weights if raised else self.token_weights
        return None if weights is None else weights[group][index]


class Operator(ABC):
    """A credit method: it judges responses, and owns its parameters.

    A subclass that needs no samples of its own has to define `judge` alone. One that is a frozen dataclass
    has its fields as parameters, which are flags and recipe keys while it is chosen; each needs a default.
    The attributes below are read by others. A subclass that wants another value sets it, or declares a
    parameter of that name.

    Methods keep nothing between calls: groups come in any order, and a step may be judged again. What one
    step is to know of those before it goes through `Judgement.memory` and `CreditContext.memory`, which the
    loop keeps with its checkpoints.
    """

    ibpo_lambda: float = 0.6
    """λ: the shaped reward is r + λφ."""
    ibpo_corrections: int = 0
    """Most samples that are asked for one response, as sizes are reckoned."""
    ibpo_joint: bool = True
    """Train on what was sampled for the responses."""
    ibpo_correction_weight: float = 1.0
    """Weight of such a sample relative to a response."""
    ibpo_correction_group: Literal["prompt", "pair"] = "prompt"
    """What its advantage is relative to: all of its prompt, or those of its own response."""
    ibpo_rewrite_penalty: float = 0.0
    """What it loses of its reward where it is `Correction.beyond_threshold`."""
    ibpo_plain_prompt: Literal["none", "successful", "one"] = "none"
    """Which of them join the responses as off-policy samples."""
    ibpo_k: int = 2
    """Solutions in a prompt of `Vocabulary.correction_prompt`, and of --eval-compare-and-correct."""
    ibpo_strip_thinking: bool = False
    """Leave <think>…</think> out of these solutions."""

    @property
    def masks_tokens(self) -> bool:
        """Whether it says which tokens of a wrong response are wrong."""
        return False

    def problems(self, config: Config) -> list[str]:
        """Return what its parameters cannot be had with, one line each."""
        return bonus_problems(self.ibpo_lambda, 1.0, "a share of up to 1", config.data.reward_threshold)

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """What is to be sampled for a group, all of whose responses are scored.

        Depends on the group and the context alone, never on other groups. Sets `group.skipped_pairs` where
        something could not be asked.
        """
        return []

    def attach(self, group: Group, follow_ups: Sequence[FollowUp], samples: Sequence[Sample]) -> None:
        """Put the samples that came of the follow-ups, in their order and scored, on the group."""
        group.corrections = [
            Correction(asked.target, asked.references, sample)
            for asked, sample in zip(follow_ups, samples, strict=True)
        ]
        for index, sample in enumerate(samples):
            sample.index = index

    @abstractmethod
    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Judge all groups of the step, ordered by prompt, corrections attached. What needs the whole step
        (an adaptive threshold, metrics) is decided here."""
        ...


class NoOperator(Operator):
    """φ = 0 everywhere: group-relative credit alone."""

    ibpo_lambda = 0.0
    ibpo_joint = False

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        return Judgement(no_phi(groups))


def bonus_problems(weight: float, most: float, factor: str, reward_threshold: float) -> list[str]:
    """Return why a wrong response, with reward 0 and the whole bonus, is not worth less than the smallest
    correct reward (ibpo steps 2 and 8); nothing where it is.

    Args:
        weight: λ.
        most: the largest φ, and `factor` what it is called.
    """
    bonus = weight * most
    product = f"--ibpo-lambda {weight} times {factor} is {bonus:g}"
    if bonus >= 1:
        return [f"{product}: λΔ must stay below 1, or a corrected wrong response is worth a correct one"]
    if bonus >= reward_threshold:
        return [
            f"{product}: a wrong response with that bonus reaches the smallest correct reward, "
            f"--reward-threshold {reward_threshold:g}; lower λ or β"
        ]
    return []


def mask_problems(variant: str, config: Config) -> list[str]:
    """Return why a variant of masks cannot be had with the estimator."""
    if variant != "signed-mask" or config.algorithm.advantages != "critic":
        return []
    return [
        "--ibpo-variant signed-mask goes by the sign of a response's advantage, and --advantages critic "
        "gives every token one of its own; take --ibpo-variant mask, or another estimator"
    ]


def no_phi(groups: Sequence[Group]) -> list[list[float]]:
    """φ = 0 of every response."""
    return [[0.0] * len(group.responses) for group in groups]


def signed_masks(masks: list[list[TokenWeights]]) -> list[list[TokenWeights]]:
    """What a response learns from when it is made likelier, by masks that say where it is wrong: the rest."""
    return [[None if mask is None else 1 - mask for mask in of_group] for of_group in masks]


def lent(tool: T | None, what: str) -> T:
    """The tool, which this algorithm needs.

    Raises:
        ValueError: the loop did not lend it.
    """
    if tool is None:
        raise ValueError(f"this algorithm needs {what}, which the loop did not lend to credit")
    return tool
