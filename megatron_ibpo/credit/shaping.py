"""Shaping of rewards: Δ of a correction and r' = r + λΔ for near misses (ibpo steps 7 and 8); the soft
overlong punishment (DAPO, arXiv 2503.14476, eq. 13); and the rewards and advantages of corrections as samples
of their own (ibpo step 11)."""

import math
from collections.abc import Sequence

from megatron_ibpo.basics.records import Correction, Group, Sample
from megatron_ibpo.credit.estimators import Advantage, ComparedSamples, Estimator, advantages, is_degenerate
from megatron_ibpo.credit.operator import CreditContext, Operator
from megatron_ibpo.credit.pairing import is_wrong


def counts(correction: Correction) -> bool:
    """Return whether the correction shows that its target was nearly right: it is right, and no rewrite."""
    return correction.response.correct and not correction.rewritten


def correction_bonus(group: Group, beta: float | None) -> list[float]:
    """Return Δ of every response: the mean over its corrections of β, or of the share of tokens that the
    correction keeps if β is None. Corrections that do not count contribute 0, and those whose verifier failed
    are left out of the mean. A response without corrections has Δ = 0."""
    earned: list[list[float]] = [[] for _ in group.responses]
    for correction in group.corrections:
        if correction.response.reward is not None:
            worth = correction.unmodified_share if beta is None else beta
            earned[correction.target].append(worth if counts(correction) else 0.0)
    return [sum(values) / len(values) if values else 0.0 for values in earned]


def shaped_rewards(
    group: Group, phi: Sequence[float], shaping_weight: float, reward_threshold: float
) -> tuple[list[float | None], int]:
    """Return (r' = r + λφ of every response, bonuses withheld); None where the verifier failed. A wrong
    response whose graded reward plus bonus would reach the smallest correct reward gets no bonus, and is
    counted. Raises ValueError for φ outside [0, 1], or above 0 for a response that is not wrong."""
    shaped: list[float | None] = []
    withheld = 0
    for response, bonus in zip(group.responses, phi, strict=True):
        if not 0 <= bonus <= 1 or (bonus > 0 and not is_wrong(response)):
            raise ValueError(
                f"the operator gave φ={bonus} to a response with reward {response.reward}: φ lies in [0, 1] "
                "and is above 0 for wrong responses only"
            )
        if response.reward is None:
            shaped.append(None)
            continue
        value = response.reward + shaping_weight * bonus
        if bonus > 0 and value >= reward_threshold:
            value = response.reward
            withheld += 1
        shaped.append(value)
    return shaped, withheld


def with_overlong_penalty(
    rewards: Sequence[float | None], responses: Sequence[Sample], context: CreditContext
) -> tuple[list[float | None], int]:
    """Return (rewards with the overlong penalty added, number of penalties limited); None stays None. The
    penalty is between 0 and -1: how far the tokens that the policy wrote reach into the last ones before the
    limit (--overlong-buffer-share).

    A penalty lowers the reward of a correct response at most to the best reward of a wrong one among those
    that are compared with it, with that one's own penalty: so a long correct response never pays so much that
    a wrong one becomes likelier at its expense. Rewards are those that are trained on, bonuses included.
    """
    limit = context.rollout.rollout_max_response_len
    buffer = context.algorithm.overlong_buffer_share * limit
    if buffer == 0:
        return list(rewards), 0
    lowered: list[float | None] = []
    best_wrong, limited = -math.inf, 0
    for reward, response in zip(rewards, responses, strict=True):
        value = None
        if reward is not None:
            reach = (response.num_trained_tokens - (limit - buffer)) / buffer
            value = reward - min(1.0, max(0.0, reach))
            best_wrong = best_wrong if response.correct else max(best_wrong, value)
        lowered.append(value)
    for index, (reward, value) in enumerate(zip(rewards, lowered, strict=True)):
        if reward is not None and value is not None and responses[index].correct:
            least = min(reward, best_wrong)
            limited += value < least
            lowered[index] = max(value, least)
    return lowered, limited


def correction_rewards(group: Group, operator: Operator, context: CreditContext) -> list[float | None]:
    """Return the plain reward of every correction, less ρ where its distance from the wrong response exceeds
    α, and less the overlong penalty, which puts no correct one below a wrong one; None where the verifier
    failed."""
    penalty = operator.ibpo_rewrite_penalty
    rewards = [
        None if c.response.reward is None else c.response.reward - penalty * c.beyond_threshold
        for c in group.corrections
    ]
    lowered, _ = with_overlong_penalty(rewards, [c.response for c in group.corrections], context)
    return lowered


def correction_advantages(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float | None]],
    estimator: Estimator,
    operator: Operator,
) -> list[list[Advantage | None]]:
    """Return the advantage of every correction of every group, relative to the corrections that it is
    compared with (--ibpo-correction-group)."""
    by_group: list[list[Advantage | None]] = [[None] * len(of_group) for of_group in rewards]
    places = [
        (number, members)
        for number, group in enumerate(groups)
        for members in compared_corrections(group, operator)
    ]
    batch = [
        ComparedSamples(
            [rewards[number][i] for i in members], [groups[number].corrections[i].response for i in members]
        )
        for number, members in places
    ]
    for (number, members), values in zip(places, advantages(batch, estimator), strict=True):
        for index, advantage in zip(members, values, strict=True):
            by_group[number][index] = advantage
    return by_group


def degenerate_correction_groups(group: Group, operator: Operator, context: CreditContext) -> int:
    """Return the number of groups of corrections whose rewards are all equal."""
    rewards = correction_rewards(group, operator, context)
    return sum(
        is_degenerate([rewards[i] for i in members]) for members in compared_corrections(group, operator)
    )


def compared_corrections(group: Group, operator: Operator) -> list[list[int]]:
    """Return the indices of the corrections that are compared with each other: all of the prompt, or those of
    a pair."""
    by_pair = operator.ibpo_correction_group == "pair"
    members: dict[int, list[int]] = {}
    for index, correction in enumerate(group.corrections):
        members.setdefault(correction.target if by_pair else 0, []).append(index)
    return list(members.values())
