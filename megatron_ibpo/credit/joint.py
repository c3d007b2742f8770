"""Corrections as samples of their own: their rewards, and what these are relative to (ibpo step 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_ibpo.credit.advantage import group_advantages, is_degenerate
from megatron_ibpo.records import Group

__all__ = ["correction_advantages", "correction_rewards", "degenerate_correction_groups"]

GroupBy = Literal["prompt", "pair"]


def correction_rewards(group: Group, rewrite_penalty: float) -> list[float | None]:
    """The plain reward of every correction, less ρ where its distance from the wrong response exceeds α;
    None where the verifier failed."""
    return [
        None if c.response.reward is None else c.response.reward - rewrite_penalty * c.beyond_threshold
        for c in group.corrections
    ]


def correction_advantages(
    group: Group, rewards: Sequence[float | None], group_by: GroupBy
) -> list[float | None]:
    """The advantage of every correction among all those of its prompt, or among those of its pair."""
    advantages: list[float | None] = [None] * len(rewards)
    for members in _members(group, group_by):
        for place, advantage in zip(members, group_advantages([rewards[i] for i in members]), strict=True):
            advantages[place] = advantage
    return advantages


def degenerate_correction_groups(group: Group, rewards: Sequence[float | None], group_by: GroupBy) -> int:
    """Groups of corrections in which there is nothing to compare."""
    return sum(is_degenerate([rewards[i] for i in members]) for members in _members(group, group_by))


def _members(group: Group, group_by: GroupBy) -> list[list[int]]:
    """Places of the corrections of each group of them."""
    members: dict[int, list[int]] = {}
    for place, correction in enumerate(group.corrections):
        members.setdefault(correction.target if group_by == "pair" else 0, []).append(place)
    return list(members.values())
