"""Corrections as samples of their own: their rewards, and what these are relative to (ibpo step 11)."""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit.estimators import Estimator, advantages, is_degenerate
from megatron_ibpo.credit.operator import CreditContext
from megatron_ibpo.credit.overlong import with_overlong_penalty


def correction_rewards(group: Group, context: CreditContext) -> list[float | None]:
    """The plain reward of every correction, less ρ where its distance from the wrong response exceeds α, and
    less the overlong penalty, which puts no correct one below a wrong one; None where the verifier failed."""
    penalty = context.algorithm.ibpo_rewrite_penalty
    rewards = [
        None if c.response.reward is None else c.response.reward - penalty * c.beyond_threshold
        for c in group.corrections
    ]
    lowered, _ = with_overlong_penalty(rewards, [c.response for c in group.corrections], context)
    return lowered


def correction_advantages(
    group: Group, rewards: Sequence[float | None], estimator: Estimator, context: CreditContext
) -> list[float | None]:
    """The advantage of every correction among those that it is compared with (--ibpo-correction-group)."""
    found: list[float | None] = [None] * len(rewards)
    for members in _compared(group, context):
        for index, advantage in zip(
            members, advantages([rewards[i] for i in members], estimator), strict=True
        ):
            found[index] = advantage
    return found


def degenerate_correction_groups(group: Group, context: CreditContext) -> int:
    """Groups of corrections in which there is nothing to compare."""
    rewards = correction_rewards(group, context)
    return sum(is_degenerate([rewards[i] for i in members]) for members in _compared(group, context))


def _compared(group: Group, context: CreditContext) -> list[list[int]]:
    """Indices of the corrections that are compared with each other: all of the prompt, or those of a pair."""
    by_pair = context.algorithm.ibpo_correction_group == "pair"
    members: dict[int, list[int]] = {}
    for index, correction in enumerate(group.corrections):
        members.setdefault(correction.target if by_pair else 0, []).append(index)
    return list(members.values())
