"""Credit: from scored groups to training sequences (ibpo steps 3 to 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.config import AlgorithmConfig, RolloutConfig
from megatron_ibpo.credit.advantage import group_advantages
from megatron_ibpo.credit.agreement import agreement
from megatron_ibpo.credit.corrections import compare_and_correct
from megatron_ibpo.credit.joint import (
    correction_advantages,
    correction_rewards,
    degenerate_correction_groups,
)
from megatron_ibpo.credit.metrics import correction_metrics, response_metrics, shaping_metrics
from megatron_ibpo.credit.operator import (
    CorrectionPrompt,
    LoopAccess,
    Operator,
    Sample,
    Score,
    TokenTexts,
    no_operator,
)
from megatron_ibpo.credit.sequences import correction_sequences, response_sequences
from megatron_ibpo.credit.shaping import shaped_rewards
from megatron_ibpo.credit.shown import ThinkingMarks
from megatron_ibpo.records import Group, TrainSequence

__all__ = ["OPERATORS", "Credit", "assign_credit"]

OPERATORS: dict[str, Operator] = {"compare-and-correct": compare_and_correct, "agreement": agreement}
"""--ibpo-operator → what judges wrong responses."""


@dataclass(frozen=True)
class Credit:
    """What a step trains on, and what was measured on the way."""

    sequences: list[TrainSequence]
    """Group by group, responses before corrections; those with advantage 0 included."""
    metrics: dict[str, float]


def assign_credit(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    sample: Sample,
    score: Score,
    correction_prompt: CorrectionPrompt,
    rollout: RolloutConfig,
    max_context: int,
    seed: int,
    step: int,
    reward_threshold: float = 1.0,
    token_texts: TokenTexts | None = None,
    thinking: ThinkingMarks | None = None,
    operator: Operator | None = None,
) -> Credit:
    """Turn the step's scored groups into weighted training sequences.

    Every sequence weighs 1 / (P·G), P·G being all responses of the step, those left out included, and a
    correction that times --ibpo-correction-weight. So the scale of the responses' part does not move with
    the number of corrections. Responses that the verifier failed on are left out of their group and of
    training, and counted. The result depends on the arguments alone, and not on the order of the groups.

    Args:
        groups: scored, all of the step, on every rank the same; corrections are filled in.
        sample, score, correction_prompt, rollout, max_context: how an operator gets more rollouts.
        seed, step: of the draws made here.
        reward_threshold: the smallest correct reward.
        token_texts, thinking: what else an operator may need to know of the vocabulary.
        operator: what judges wrong responses; by default the one of --ibpo-operator.
    """
    if operator is None:
        operator = _operator(algorithm)
    loop = LoopAccess(
        sample, score, correction_prompt, rollout, max_context, seed, step, token_texts, thinking
    )
    judgement = operator(groups, algorithm, loop)

    num_responses = sum(len(group.responses) for group in groups)
    weight = 1 / num_responses if num_responses else 0.0
    token_weights = judgement.token_weights or [[None] * len(group.responses) for group in groups]
    sequences: list[TrainSequence] = []
    shaped = []
    bonuses_withheld = degenerate = 0
    for number, group in enumerate(groups):
        phi = judgement.phi[number]
        rewards, withheld = shaped_rewards(group, phi, algorithm.ibpo_lambda, reward_threshold)
        shaped.append(rewards)
        bonuses_withheld += withheld
        sequences += response_sequences(
            group, number, group_advantages(rewards), token_weights[number], weight
        )
        joint_rewards = correction_rewards(group, algorithm.ibpo_rewrite_penalty)
        degenerate += degenerate_correction_groups(group, joint_rewards, algorithm.ibpo_correction_group)
        if algorithm.ibpo_joint:
            advantages = correction_advantages(group, joint_rewards, algorithm.ibpo_correction_group)
            sequences += correction_sequences(
                group, number, advantages, weight * algorithm.ibpo_correction_weight
            )
    metrics = response_metrics(groups) | shaping_metrics(groups, judgement.phi, shaped) | judgement.metrics
    metrics["bonuses_withheld"] = float(bonuses_withheld)
    if operator is compare_and_correct:
        metrics |= correction_metrics(groups)
        metrics["degenerate_correction_groups"] = float(degenerate)
    return Credit(sequences, metrics)


def _operator(algorithm: AlgorithmConfig) -> Operator:
    if algorithm.ibpo_operator == "compare-and-correct" and algorithm.ibpo_corrections == 0:
        return no_operator
    return OPERATORS[algorithm.ibpo_operator]
