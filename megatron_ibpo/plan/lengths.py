"""Lengths of responses: recorded ones, or a log-normal distribution truncated at the longest."""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

SIGMA = 1.0
"""Assumed standard deviation of the logarithm of lengths before truncation."""
MOST_STAND_INS = 256
"""Most responses of an engine to simulate one by one."""
_NORMAL = NormalDist()
_POINTS = 512


def log_normal(mean: float, longest: float, count: int, sigma: float = SIGMA) -> np.ndarray:
    """Return `count` quantiles of lengths in order, none above `longest`, with the given mean.

    Raises:
        ValueError: the mean is not between 1 and the longest.
    """
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean length of {mean:g} is not between 1 and the longest, {longest:g}")
    median = median_length(mean, longest, sigma)
    return np.clip(median * np.exp(sigma * _quantiles(count)), 1, longest)


def recorded(lengths: Sequence[float] | np.ndarray, count: int) -> np.ndarray:
    """Return `count` quantiles of a run's lengths."""
    return np.quantile(np.asarray(lengths, np.float64), (np.arange(count) + 0.5) / count)


def stand_ins(lengths: Sequence[float] | np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """Return the lengths of `count` responses with these quantiles, in order of arrival, and the number of
    responses that each represents."""
    own = min(count, MOST_STAND_INS)
    if own == 0:
        return np.empty(0), 1.0
    picked = recorded(lengths, own)
    picked *= np.mean(lengths) / picked.mean()
    return np.random.default_rng(0).permutation(picked), count / own


@lru_cache(maxsize=256)
def median_length(mean: float, longest: float, sigma: float = SIGMA) -> float:
    """Return the median of the distribution before truncation, by bisection: the mean grows with it."""
    low, high = 0.0, math.log(longest) + 12 * sigma
    spread = np.exp(sigma * _quantiles(_POINTS))
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(math.exp(middle) * spread, 1, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return math.exp(high)


@lru_cache(maxsize=32)
def _quantiles(count: int) -> np.ndarray:
    return np.array([_NORMAL.inv_cdf((place + 0.5) / count) for place in range(count)])
