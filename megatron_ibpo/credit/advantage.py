"""Group-relative advantages (ibpo step 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["group_advantages", "is_degenerate"]

_EPSILON = 1e-8


def is_degenerate(rewards: Sequence[float | None]) -> bool:
    """Nothing to compare: fewer than two different rewards."""
    return len({reward for reward in rewards if reward is not None}) < 2


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """A_i = (r_i - mean) / (std + 1e-8) with the population std of the group, in float64.

    None (the verifier failed) stays out of mean and std and has no advantage. A degenerate group has
    advantages of exactly 0: the rounding error of equal rewards would otherwise be blown up to order 1 in
    float32. Sums are exact, so that the order of the group does not matter.
    """
    if is_degenerate(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    known = [reward for reward in rewards if reward is not None]
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / len(known))
    return [None if reward is None else (reward - mean) / (std + _EPSILON) for reward in rewards]
