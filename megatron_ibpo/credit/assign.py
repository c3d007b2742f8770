"""Credit: from scored groups to training sequences (ibpo steps 3 to 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.config import AlgorithmConfig, RolloutConfig
from megatron_ibpo.credit.advantage import group_advantages
from megatron_ibpo.credit.corrections import compare_and_correct
from megatron_ibpo.credit.metrics import correction_metrics, response_metrics, shaping_metrics
from megatron_ibpo.credit.operator import CorrectionPrompt, LoopAccess, Operator, Sample, Score, no_operator
from megatron_ibpo.credit.sequences import correction_sequences, response_sequences
from megatron_ibpo.credit.shaping import shaped_rewards
from megatron_ibpo.records import Group, TrainSequence

__all__ = ["Credit", "assign_credit"]


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
    operator: Operator | None = None,
) -> Credit:
    """Turn the step's scored groups into weighted training sequences.

    Every sequence weighs 1 / (P·G), P·G being all responses of the step, those left out included, and a
    correction that times --ibpo-correction-weight. So the scale of the responses' part does not move with
    the number of corrections. Responses that the verifier failed on are left out of their group and of
    training, and counted. The result depends on the arguments alone, and not on the order of the groups.

    Args:
        groups: scored; corrections are filled in.
        sample, score, correction_prompt, rollout, max_context: how an operator gets more rollouts.
        seed, step: of the draws made here.
        reward_threshold: the smallest correct reward.
        operator: what judges wrong responses; by default compare-and-correct, or nothing where
            --ibpo-corrections is 0.
    """
    if operator is None:
        operator = compare_and_correct if algorithm.ibpo_corrections > 0 else no_operator
    loop = LoopAccess(sample, score, correction_prompt, rollout, max_context, seed, step)
    judgement = operator(groups, algorithm, loop)

    num_responses = sum(len(group.responses) for group in groups)
    weight = 1 / num_responses if num_responses else 0.0
    sequences: list[TrainSequence] = []
    shaped = []
    bonuses_withheld = 0
    for number, (group, phi) in enumerate(zip(groups, judgement.phi, strict=True)):
        rewards, withheld = shaped_rewards(group, phi, algorithm.ibpo_lambda, reward_threshold)
        shaped.append(rewards)
        bonuses_withheld += withheld
        sequences += response_sequences(group, number, group_advantages(rewards), weight)
        if algorithm.ibpo_joint:
            sequences += correction_sequences(group, number, weight * algorithm.ibpo_correction_weight)
    metrics = response_metrics(groups) | shaping_metrics(groups, judgement.phi, shaped)
    metrics["bonuses_withheld"] = float(bonuses_withheld)
    if algorithm.ibpo_corrections > 0:
        metrics |= correction_metrics(groups) | judgement.metrics
    return Credit(sequences, metrics)
