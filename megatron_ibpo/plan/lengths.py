"""Lengths of responses: given ones, or a log-normal distribution that is cut off at the longest."""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

SIGMA = 1.0
"""Of the logarithm of lengths before the cut, where nothing tells it; as in tools/bench_streaming.py."""
_NORMAL = NormalDist()
_POINTS = 512


def fixed(length: float, count: int) -> np.ndarray:
    """`count` responses of one length."""
    return np.full(count, float(length))


def uniform(mean: float, count: int) -> np.ndarray:
    """`count` lengths spread evenly between 1 and what gives the mean."""
    return np.linspace(1, max(1.0, 2 * mean - 1), count)


def log_normal(mean: float, longest: float, count: int, sigma: float = SIGMA) -> np.ndarray:
    """`count` lengths, the distribution's quantiles in order, of which none exceeds `longest` and the mean is
    as given.

    Raises:
        ValueError: the mean is not between 1 and the longest.
    """
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean length of {mean:g} is not between 1 and the longest, {longest:g}")
    median = median_length(mean, longest, sigma)
    return np.clip(median * np.exp(sigma * _quantiles(count)), 1, longest)


def recorded(lengths: Sequence[float], count: int) -> np.ndarray:
    """`count` quantiles of lengths that a run had."""
    return np.quantile(np.asarray(lengths, np.float64), (np.arange(count) + 0.5) / count)


def shuffled(lengths: np.ndarray, seed: int = 0) -> np.ndarray:
    """In the order in which they come; engines do not know them beforehand."""
    return np.random.default_rng(seed).permutation(lengths)


@lru_cache(maxsize=256)
def median_length(mean: float, longest: float, sigma: float = SIGMA) -> float:
    """Of the log-normal distribution before the cut, by bisection: the mean after it grows with it."""
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
