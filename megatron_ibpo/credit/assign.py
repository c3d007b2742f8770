"""Credit: from scored groups to training sequences (ibpo steps 3 to 11)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

from megatron_ibpo.basics.records import Group, TrainSequence
from megatron_ibpo.credit.estimators import (
    Advantage,
    ComparedSamples,
    Estimator,
    ValueEstimator,
    advantages,
    is_degenerate,
    mean_advantage,
    needs_critic,
)
from megatron_ibpo.credit.explanation import GroupExplanation, Line, SampleKey
from megatron_ibpo.credit.metrics import response_metrics, shaping_metrics
from megatron_ibpo.credit.operator import CreditContext, Judgement, Memory, Operator, TokenWeights
from megatron_ibpo.credit.registries import Method, find_method
from megatron_ibpo.credit.shaping import (
    correction_advantages,
    correction_rewards,
    counts,
    shaped_rewards,
    with_overlong_penalty,
)
from megatron_ibpo.credit.step_explanation import StepCredit, check_words, explain_step
from megatron_ibpo.credit.token_credit import weigh_tokens
from megatron_ibpo.credit.train_sequences import joining_rewards, plain_prompt_sequences, train_sequences
from megatron_ibpo.credit.value_credit import value_credit

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Credit:
    """Training sequences of a step, with the metrics of making them."""

    sequences: list[TrainSequence]
    """Sequences group by group, responses before corrections; those with advantage 0 included."""
    metrics: dict[str, float]
    memory: Memory = field(default_factory=dict)
    """Memory for the context of the next step (`CreditContext.memory`)."""
    parts: StepCredit | None = None

    @cached_property
    def explanations(self) -> list[GroupExplanation]:
        """Explanations of the advantage of every sample, by group. Written when first read."""
        return [] if self.parts is None else explain_step(self.parts)


def assign_credit(groups: Sequence[Group], context: CreditContext, method: Method | None = None) -> Credit:
    """Turn all of the step's scored groups, corrections attached, into weighted training sequences, and fill
    in the operator's findings about the corrections.

    Every sequence weighs 1 / (P·G). P·G counts all responses of the step, including those left out.
    Corrections weigh --ibpo-correction-weight times that, so the scale of the responses' part does not depend
    on the number of corrections. Responses whose verifier failed are left out of their group and of training,
    and counted. The order of the groups affects only the order of the sequences.

    Args:
        method: the built method; None: built from the settings in the context.

    Raises:
        ValueError: the operator, the estimator or the token credit is unknown, gives an invalid result, or
            needs something that the context lacks.
    """
    method = method or find_method(context.algorithm)
    operator, estimator = method.operator, method.estimator
    judgement = operator.judge(groups, context)
    num_responses = sum(len(group.responses) for group in groups)
    weight = 1 / num_responses if num_responses else 0.0
    correction_weight = weight * operator.ibpo_correction_weight

    compared, limits = _compared_rewards(groups, judgement, operator, context)
    relative = advantages(compared, estimator)
    shaped, joining = _split_joined(groups, [list(samples.rewards) for samples in compared])
    of_responses, of_joining = _split_joined(groups, relative)
    means = [
        [mean_advantage(*pair) for pair in zip(values, group.responses, strict=True)]
        for values, group in zip(of_responses, groups, strict=True)
    ]
    factors = weigh_tokens(groups, means, judgement, method.token_credit, context)
    rewards_of, advantages_of = _corrections(groups, judgement, operator, estimator, context)
    sequences: list[TrainSequence] = []
    for number, (group, rewards) in enumerate(zip(groups, shaped, strict=True)):
        columns = zip(group.responses, rewards, of_responses[number], factors.weights[number], strict=True)
        sequences += train_sequences(group, number, "response", columns, weight)
        if operator.ibpo_joint:
            corrections = [correction.response for correction in group.corrections]
            nothing: list[TokenWeights] = [None] * len(corrections)
            columns = zip(corrections, rewards_of[number], advantages_of[number], nothing, strict=True)
            sequences += train_sequences(group, number, "correction", columns, correction_weight)
        if joining[number]:
            sequences += plain_prompt_sequences(
                group, number, joining[number], of_joining[number], correction_weight
            )
    metrics = response_metrics(groups) | shaping_metrics(groups, judgement.phi, shaped) | limits
    if operator.ibpo_plain_prompt != "none":
        metrics["joined_corrections"] = float(sum(r is not None for of_group in joining for r in of_group))
        metrics["degenerate_groups"] = float(sum(is_degenerate(samples.rewards) for samples in compared))
    lines: dict[SampleKey, list[Line]] = {}
    if needs_critic(estimator):
        sequences, of_critic, lines = value_credit(sequences, cast(ValueEstimator, estimator), context)
        metrics |= of_critic
    check_words(groups, judgement)
    parts = StepCredit(
        groups=groups,
        judgement=judgement,
        operator=operator,
        reward_threshold=context.reward_threshold,
        compared=compared,
        correction_rewards=rewards_of,
        estimator=estimator,
        correction_estimator=judgement.follow_up_estimator or estimator,
        sequences=sequences,
        notes=lines,
        token_note=factors.note,
    )
    metrics = metrics | judgement.metrics | factors.metrics
    return Credit(sequences, metrics, judgement.memory, parts)


def _compared_rewards(
    groups: Sequence[Group], judgement: Judgement, operator: Operator, context: CreditContext
) -> tuple[list[ComparedSamples], dict[str, float]]:
    """Return (the samples compared in every group, numbers of bonuses withheld and of overlong penalties
    limited). The samples are the group's responses, then the corrections that may join them, with their
    rewards as they are trained on; None for a correction that does not join."""
    compared: list[ComparedSamples] = []
    all_withheld = all_limited = 0
    for group, phi in zip(groups, judgement.phi, strict=True):
        rewards, withheld = shaped_rewards(group, phi, operator.ibpo_lambda, context.reward_threshold)
        joining = joining_rewards(group, operator.ibpo_plain_prompt)
        samples = group.samples if joining else group.responses
        lowered, limited = with_overlong_penalty([*rewards, *joining], samples, context)
        compared.append(ComparedSamples(lowered, samples))
        all_withheld += withheld
        all_limited += limited
    limits = {"bonuses_withheld": float(all_withheld)}
    if context.algorithm.overlong_buffer_share > 0:
        limits["overlong_penalties_limited"] = float(all_limited)
    return compared, limits


def _corrections(
    groups: Sequence[Group],
    judgement: Judgement,
    operator: Operator,
    estimator: Estimator,
    context: CreditContext,
) -> tuple[list[list[float | None]], list[list[Advantage | None]]]:
    """Return (rewards, advantages) of the corrections of every group as samples of their own. Those that are
    not trained on have no advantage."""
    if not operator.ibpo_joint:
        return [], []
    rewards = [correction_rewards(group, operator, context) for group in groups]
    follow_up_estimator = judgement.follow_up_estimator or estimator
    relative = correction_advantages(groups, rewards, follow_up_estimator, operator)
    if operator.ibpo_joint_on == "successful":
        relative = [
            [a if counts(c) else None for c, a in zip(group.corrections, of_group, strict=True)]
            for group, of_group in zip(groups, relative, strict=True)
        ]
    return rewards, relative


def _split_joined(groups: Sequence[Group], values: Sequence[list[T]]) -> tuple[list[list[T]], list[list[T]]]:
    """Split the values of every group into (those of its responses, of corrections that may join)."""
    sizes = [len(group.responses) for group in groups]
    pairs = list(zip(values, sizes, strict=True))
    return [of_group[:size] for of_group, size in pairs], [of_group[size:] for of_group, size in pairs]
