"""Credit: from scored groups to training sequences (ibpo steps 3 to 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.config import AlgorithmConfig, RolloutConfig
from megatron_ibpo.credit.advantage import group_advantages
from megatron_ibpo.credit.agreement import agreement
from megatron_ibpo.credit.corrections import compare_and_correct
from megatron_ibpo.credit.gae import critic_credit
from megatron_ibpo.credit.importance import span_masking
from megatron_ibpo.credit.joint import (
    correction_advantages,
    correction_rewards,
    degenerate_correction_groups,
)
from megatron_ibpo.credit.metrics import correction_metrics, response_metrics, shaping_metrics
from megatron_ibpo.credit.operator import (
    CorrectionPrompt,
    LogProbs,
    LoopAccess,
    Operator,
    Sample,
    Score,
    TokenTexts,
    Values,
    lent,
    no_operator,
)
from megatron_ibpo.credit.overlong import with_overlong_penalty
from megatron_ibpo.credit.sequences import correction_sequences, response_sequences
from megatron_ibpo.credit.shaping import shaped_rewards
from megatron_ibpo.credit.shown import ThinkingMarks
from megatron_ibpo.records import Group, TrainSequence

__all__ = ["OPERATORS", "Credit", "assign_credit"]

OPERATORS: dict[str, Operator] = {
    "compare-and-correct": compare_and_correct,
    "agreement": agreement,
    "span-masking": span_masking,
}
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
    logprobs: LogProbs | None = None,
    placeholder_id: int | None = None,
    values: Values | None = None,
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
        token_texts, thinking, placeholder_id: what else an operator may need to know of the vocabulary.
        logprobs: asks the policy, for --ibpo-operator span-masking.
        values: asks the critic, for --advantages critic.
        operator: what judges wrong responses; by default the one of --ibpo-operator.
    """
    if operator is None:
        operator = _operator(algorithm)
    loop = LoopAccess(
        sample,
        score,
        correction_prompt,
        rollout,
        max_context,
        seed,
        step,
        token_texts,
        thinking,
        logprobs,
        placeholder_id,
    )
    judgement = operator(groups, algorithm, loop)
    token_weights = judgement.token_weights or [[None] * len(group.responses) for group in groups]
    num_responses = sum(len(group.responses) for group in groups)
    weight = 1 / num_responses if num_responses else 0.0

    sequences: list[TrainSequence] = []
    rewards = [
        _rewards(group, phi, algorithm, rollout, reward_threshold)
        for group, phi in zip(groups, judgement.phi, strict=True)
    ]
    for number, (group, own) in enumerate(zip(groups, rewards, strict=True)):
        advantages = _relative(own.responses, algorithm)
        sequences += response_sequences(group, number, advantages, token_weights[number], weight)
        if algorithm.ibpo_joint:
            advantages = _relative_corrections(group, own.corrections, algorithm)
            sequences += correction_sequences(
                group, number, advantages, weight * algorithm.ibpo_correction_weight
            )
    metrics = response_metrics(groups) | shaping_metrics(
        groups, judgement.phi, [r.responses for r in rewards]
    )
    metrics["bonuses_withheld"] = float(sum(r.bonuses_withheld for r in rewards))
    if operator is compare_and_correct:
        metrics |= correction_metrics(groups)
        metrics["degenerate_correction_groups"] = float(
            sum(
                degenerate_correction_groups(group, own.corrections, algorithm.ibpo_correction_group)
                for group, own in zip(groups, rewards, strict=True)
            )
        )
    if algorithm.advantages == "critic":
        sequences, of_critic = critic_credit(
            sequences, lent(values, "a critic"), gamma=algorithm.gae_gamma, lam=algorithm.gae_lambda
        )
        metrics |= of_critic
    return Credit(sequences, metrics | judgement.metrics)


@dataclass(frozen=True)
class _Rewards:
    """Of one group, as they are trained on; None where the verifier failed."""

    responses: list[float | None]
    corrections: list[float | None]
    bonuses_withheld: int


def _rewards(
    group: Group,
    phi: Sequence[float],
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    reward_threshold: float,
) -> _Rewards:
    shaped, withheld = shaped_rewards(group, phi, algorithm.ibpo_lambda, reward_threshold)
    corrections = correction_rewards(group, algorithm.ibpo_rewrite_penalty)
    limit, share = rollout.rollout_max_response_len, algorithm.overlong_buffer_share
    return _Rewards(
        with_overlong_penalty(shaped, group.responses, limit, share),
        with_overlong_penalty(corrections, [c.response for c in group.corrections], limit, share),
        withheld,
    )


def _relative(rewards: Sequence[float | None], algorithm: AlgorithmConfig) -> list[float | None]:
    """Advantages in the group; the rewards themselves where a critic will make advantages of them."""
    return group_advantages(rewards) if algorithm.advantages == "group" else list(rewards)


def _relative_corrections(
    group: Group, rewards: Sequence[float | None], algorithm: AlgorithmConfig
) -> list[float | None]:
    if algorithm.advantages == "critic":
        return list(rewards)
    return correction_advantages(group, rewards, algorithm.ibpo_correction_group)


def _operator(algorithm: AlgorithmConfig) -> Operator:
    if algorithm.ibpo_operator == "compare-and-correct" and algorithm.ibpo_corrections == 0:
        return no_operator
    return OPERATORS[algorithm.ibpo_operator]
