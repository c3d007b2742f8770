"""Estimators: what a reward is relative to (ibpo step 9).

An estimator takes the rewards that are compared with each other, of one prompt's responses or of its
corrections, and gives each its advantage. It is a plain function, so that another one is a few lines.
"""

import math
from collections.abc import Callable, Sequence

from megatron_ibpo.config import known_or_path, load_hook

Estimator = Callable[[Sequence[float]], Sequence[float]]
"""Rewards that are compared → the advantage of each, in the same order."""

CRITIC = "critic"
"""--advantages of PPO: token by token, a reward is relative to what a critic expected (`gae.py`)."""

_EPSILON = 1e-8


def is_degenerate(rewards: Sequence[float | None]) -> bool:
    """Nothing to compare: fewer than two different rewards."""
    return len({reward for reward in rewards if reward is not None}) < 2


def group_mean(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean, in float64: the advantage of Dr. GRPO (arXiv 2503.20783), which has no std because
    dividing by it makes questions that are nearly always or nearly never answered count more.

    Equal rewards have advantages of exactly 0: their rounding error would otherwise be a gradient. Sums are
    exact, so that the order of the group does not matter.
    """
    if is_degenerate(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def group_z_score(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-8) with the population std of the group (GRPO, arXiv 2402.03300).

    The population's std and not Bessel's, since the group is all that there is, and so is IBPO's.
    """
    return _z_score(rewards, len(rewards))


def group_z_score_bessel(rewards: Sequence[float]) -> list[float]:
    """The same with Bessel's std, of a sum divided by n - 1, as verl, TRL, slime and oat have it: advantages
    are √((n - 1)/n) times those of `group_z_score`, .94 at n = 8 and .71 at n = 2."""
    return _z_score(rewards, len(rewards) - 1)


def _z_score(rewards: Sequence[float], divisor: int) -> list[float]:
    centred = group_mean(rewards)
    std = math.sqrt(math.fsum(value**2 for value in centred) / max(1, divisor))
    return [value / (std + _EPSILON) for value in centred]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean) / mean: the mean takes the place of the std, so that rare successes count more. Its
    gradient is that of the log of the mean success, to the order of the group (MaxRL, arXiv 2602.02710).

    A group without a success has advantages of 0.

    Raises:
        ValueError: a reward below 0, of which there is no logarithm.
    """
    if rewards and min(rewards) < 0:
        raise ValueError(
            f"--advantages maxrl takes the log of a mean reward, and a reward is {min(rewards):g}: it needs "
            "rewards of at least 0, so no --overlong-buffer-share and no --ibpo-rewrite-penalty"
        )
    centred = group_mean(rewards)
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [value / mean if mean > 0 else 0.0 for value in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i less the mean of the other rewards (RLOO, arXiv 2402.14740), which is n / (n - 1) times r_i
    less the mean of all: without a bias, since no reward is compared with itself."""
    others = max(1, len(rewards) - 1)
    return [value * len(rewards) / others for value in group_mean(rewards)]


ESTIMATORS: dict[str, Estimator] = {
    "group": group_z_score,
    "group-bessel": group_z_score_bessel,
    "group-mean": group_mean,
    "leave-one-out": leave_one_out,
    "maxrl": maxrl,
    CRITIC: lambda rewards: [0.0] * len(rewards),  # the critic is asked once all sequences are there
}
"""--advantages → the estimator."""


def find_estimator(name: str) -> Estimator:
    """The estimator called `name`, or the one at the import path package.module:name.

    Raises:
        ValueError: there is none.
    """
    known = known_or_path("--advantages", name, ESTIMATORS, "estimator")
    return known or load_hook("--advantages", name, called_with="rewards")


def advantages(rewards: Sequence[float | None], estimator: Estimator) -> list[float | None]:
    """The advantage of every reward among the known ones; None (the verifier failed) stays None.

    Raises:
        ValueError: the estimator gives other than one finite number for each reward.
    """
    known = [reward for reward in rewards if reward is not None]
    found = [float(value) for value in estimator(known)] if known else []
    if len(found) != len(known) or not all(map(math.isfinite, found)):
        raise ValueError(
            f"the estimator --advantages made {found} of the rewards {known}: it must give one finite number "
            "for each"
        )
    left = iter(found)
    return [None if reward is None else next(left) for reward in rewards]
