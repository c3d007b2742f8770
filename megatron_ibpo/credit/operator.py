"""The interface between credit and a comparison operator.

An operator sees the scored groups of a step and rates, for every response, how near it was to being right: φ
in [0, 1], 0 for correct ones. It may also choose the tokens to learn from. It requests further samples for a
group as soon as that group is scored, and judges the step when all its groups are there. Compare-and-correct
(`corrections.py`) is one operator, those of `examples/credit/` are others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

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
from megatron_ibpo.credit.estimators import Estimator
from megatron_ibpo.credit.explanation import Line
from megatron_ibpo.credit.pairing import ThinkingMarks

CorrectionPrompt = Callable[[Prompt, TokenIds, Sequence[TokenIds]], TokenIds]
"""(prompt, wrong response, references) → token ids of x̃, all without end-of-sequence ids."""
AnswerStart = Callable[[Prompt, TokenIds], int | None]
"""Index of the first token of the final answer in a response to the prompt; None if it has none."""
TokenTexts = Callable[[TokenIds], list[str]]
"""Token ids → the text of each token."""


@dataclass(frozen=True, eq=False)
class LogProbQuery:
    """A query for the log-probs of one continuation."""

    context: TokenIds
    continuation: TokenIds
    temperature: float


LogProbs = Callable[[list[LogProbQuery]], list[Floats]]
"""Queries → log-prob of each token of the continuations under the present policy."""
Values = Callable[[list[TrainSequence]], list[Floats]]
"""Sequences → the critic's value before each response token."""
TokenWeights = Weights | None
"""Factors on the gradient of each token of a response, end-of-sequence id included; None: all ones. Factors
of tokens that are not trained on (`Sample.loss_mask`) have no effect."""

Memory = Mapping[str, Any]
"""State that an operator carries to the next step, as JSON."""

SamplePrice = Callable[..., float]
"""(tokens of the prompt, of the response, sharing=…, trained=…) → cost of a sample in operations, as the
run's meter counts them. `sharing` samples share one reading of the prompt; an update on the sample takes
`trained` tokens, 0 without one."""

T = TypeVar("T")


@dataclass(frozen=True)
class Vocabulary:
    """Facts about tokens that credit may need; one object for the whole run."""

    correction_prompt: CorrectionPrompt
    token_texts: TokenTexts | None = None
    thinking: ThinkingMarks | None = None
    """Token ids of <think> and </think>, for --ibpo-strip-thinking."""
    placeholder_id: int | None = None
    """Token that stands for a masked one."""
    answer_start: AnswerStart | None = None
    """None if the verifier does not define answers; leakage is then unknown."""


@dataclass(frozen=True)
class CreditContext:
    """The inputs of one step's credit besides the groups."""

    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    """Sampling of the responses; corrections are sampled in the same way."""
    vocabulary: Vocabulary
    max_context: int
    """Limit of tokens in prompt and response together."""
    seed: int
    step: int
    """Step number. Every draw depends only on the seed, the step and a prompt's index."""
    reward_threshold: float = 1.0
    """The smallest correct reward."""
    logprobs: LogProbs | None = None
    """Asks the policy."""
    values: Values | None = None
    """Asks the critic, for an estimator that needs one."""
    price: SamplePrice | None = None
    """Asks the run's meter."""
    memory: Memory = field(default_factory=dict)
    """Memory that the operator kept from the previous step (`Judgement.memory`)."""


@dataclass(frozen=True, eq=False)
class FollowUp:
    """A further sample that an operator requests for a scored group."""

    target: int
    """Index in `Group.responses` of the response to correct."""
    references: tuple[int, ...]
    """Indices in `Group.responses` of the solutions shown along with it, in drawn order."""
    request: SampleRequest


@dataclass(frozen=True)
class Judgement:
    """An operator's result for a step."""

    phi: list[list[float]]
    """φ of every response of every group, in [0, 1]."""
    token_weights: list[list[TokenWeights]] | None = None
    """Weights for every response of every group; None: all ones."""
    metrics: dict[str, float] = field(default_factory=dict)
    raised_token_weights: list[list[TokenWeights]] | None = None
    """Weights in place of `token_weights` for responses with an advantage above 0, which are made likelier;
    None: the same."""
    memory: Memory = field(default_factory=dict)
    """Memory for the context of the next step."""
    follow_up_estimator: Estimator | None = None
    """Estimator for the rewards of the requested samples; None: the one for responses."""
    explanations: list[list[list[Line]]] | None = None
    """Lines for readers on how φ and the weights of every response of every group came about; None: readers
    get φ alone. A line called "φ" or "φ = …" replaces the general one."""

    def weights_of(self, group: int, index: int, advantage: float | None) -> TokenWeights:
        """Return the token weights of a response that has this advantage."""
        raised = advantage is not None and advantage > 0 and self.raised_token_weights is not None
        weights = self.raised_token_weights if raised else self.token_weights
        return None if weights is None else weights[group][index]


class Operator(ABC):
    """A credit method: it judges responses, and owns its parameters.

    A subclass that needs no samples of its own defines only `judge`. The fields of a frozen dataclass are its
    parameters, which are flags and recipe keys while it is chosen; each needs a default. Other code reads the
    attributes below. A subclass that wants another value sets it, or declares a parameter of that name.

    Methods keep no state between calls: groups come in any order, and a step may be judged again. State for
    the next step goes through `Judgement.memory` and `CreditContext.memory`, which the loop keeps with its
    checkpoints.
    """

    ibpo_lambda: float = 0.6
    """λ: the shaped reward is r + λφ."""
    ibpo_corrections: int = 0
    """Most samples requested per response, for estimates of size."""
    ibpo_joint: bool = True
    """Train on the samples requested for the responses."""
    ibpo_joint_on: Literal["all", "successful"] = "all"
    """Corrections to train on: all, or only right ones that are no rewrite."""
    ibpo_correction_weight: float = 1.0
    """Weight of such a sample relative to a response."""
    ibpo_correction_group: Literal["prompt", "pair"] = "prompt"
    """Comparison group of its advantage: all such samples of its prompt, or those of its own response."""
    ibpo_rewrite_penalty: float = 0.0
    """Deducted from its reward if `Correction.beyond_threshold`."""
    ibpo_plain_prompt: Literal["none", "successful", "one"] = "none"
    """Choice of the samples that join the responses as off-policy samples."""
    ibpo_k: int = 2
    """Solutions in a prompt of `Vocabulary.correction_prompt`, and of --eval-compare-and-correct."""
    ibpo_strip_thinking: bool = False
    """Leave <think>…</think> out of these solutions."""

    @property
    def masks_tokens(self) -> bool:
        """True if the operator chooses which tokens of a wrong response are wrong."""
        return False

    def problems(self, config: Config) -> list[str]:
        """Return the problems of its parameters with the configuration, one line each."""
        return bonus_problems(self.ibpo_lambda, 1.0, "a share of up to 1", config.data.reward_threshold)

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """Return the samples to request for a group whose responses are all scored, by the group and the
        context alone. Sets `group.skipped_pairs` if something could not be requested."""
        return []

    def attach(self, group: Group, follow_ups: Sequence[FollowUp], samples: Sequence[Sample]) -> None:
        """Attach to the group the scored samples of the follow-ups, in their order."""
        group.corrections = [
            Correction(follow_up.target, follow_up.references, sample)
            for follow_up, sample in zip(follow_ups, samples, strict=True)
        ]
        for index, sample in enumerate(samples):
            sample.index = index

    @abstractmethod
    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Judge all groups of the step, ordered by prompt, corrections attached. Anything that needs the
        whole step (an adaptive threshold, metrics) is decided here."""
        ...


class NoOperator(Operator):
    """φ = 0 everywhere: only group-relative credit."""

    ibpo_lambda = 0.0
    ibpo_joint = False

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        return Judgement(no_phi(groups))


def bonus_problems(weight: float, largest_phi: float, factor: str, reward_threshold: float) -> list[str]:
    """Return an error if a wrong response, with reward 0 and the whole bonus of λ times the largest φ, which
    messages call `factor`, is worth as much as the smallest correct reward (ibpo steps 2 and 8)."""
    bonus = weight * largest_phi
    product = f"--ibpo-lambda {weight} times {factor} is {bonus:g}"
    if bonus >= min(1.0, reward_threshold):
        return [
            f"{product}: λΔ must stay below 1, and below the smallest correct reward, --reward-threshold "
            f"{reward_threshold:g}, or a corrected wrong response is worth as much as a correct one; lower λ "
            "or β"
        ]
    return []


def no_phi(groups: Sequence[Group]) -> list[list[float]]:
    """Return φ = 0 for every response."""
    return [[0.0] * len(group.responses) for group in groups]


def signed_masks(masks: list[list[TokenWeights]]) -> list[list[TokenWeights]]:
    """Invert masks that mark what is wrong, for responses that are made likelier."""
    return [[None if mask is None else 1 - mask for mask in of_group] for of_group in masks]


def require_tool(tool: T | None, name: str) -> T:
    """Return the tool, which this algorithm needs. Raises ValueError if the loop did not provide it."""
    if tool is None:
        raise ValueError(f"this algorithm needs {name}, which this run does not lend to credit")
    return tool
