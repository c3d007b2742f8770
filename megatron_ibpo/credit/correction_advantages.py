"""Corrections as samples of their own: their rewards and advantages (ibpo step 11)."""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit.estimators import Advantage, ComparedSamples, Estimator, advantages, is_degenerate
from megatron_ibpo.credit.operator import CreditContext, Operator
from megatron_ibpo.credit.shaping import with_overlong_penalty


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
