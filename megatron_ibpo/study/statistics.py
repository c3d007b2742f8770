"""Statistics of a comparison of methods over seeds, and the number of seeds that it needs.

Every method is trained with the same seeds and tested on the same problems, so two methods are paired seed by
seed.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
WINDOW_RESPONSES = 640
"""Responses over which a training reward is averaged: five steps of 16 prompts with 8 responses."""


@dataclass(frozen=True)
class Estimate:
    """A mean of independent values, its 95 % interval by Student's t, and the test that it is 0."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided p. As the interval and the spread NaN for one value, which has no spread."""
    spread: float
    """Standard deviation of the values."""


def estimate(values: Array | Sequence[float]) -> Estimate:
    """Return the mean of values, one per seed or problem. Of paired differences p is the paired t test's."""
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, math.nan)
    if np.ptp(values) < 1e-9:  # equal up to rounding: scipy warns, or returns NaN
        return Estimate(mean, mean, mean, float(abs(mean) < 1e-9), 0.0)
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(CONFIDENCE)
    return Estimate(
        mean, float(interval.low), float(interval.high), float(test.pvalue), float(values.std(ddof=1))
    )


def interaction_p(differences_ST: Array) -> float:
    """Return the p of the hypothesis that a method's difference is the same on all tasks: Hotelling's T² of
    the differences between tasks, paired over seeds. For two tasks it is the paired t test. NaN unless there
    are more seeds than tasks less one, or if the differences do not vary over seeds.

    Args:
        differences_ST: method minus baseline of every seed on every task.
    """
    contrasts = differences_ST[:, 1:] - differences_ST[:, :1]
    seeds, number = contrasts.shape
    if seeds <= number:
        return math.nan
    covariance = np.atleast_2d(np.cov(contrasts, rowvar=False))
    if np.linalg.matrix_rank(covariance, tol=1e-12) < number:
        return math.nan
    mean = contrasts.mean(axis=0)
    squared = seeds * mean @ np.linalg.solve(covariance, mean)
    return float(stats.f.sf(squared * (seeds - number) / (number * (seeds - 1)), number, seeds - number))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p values of several tests so that together they have the false-positive rate of one: Holm's
    step-down (Scandinavian Journal of Statistics 6, 1979, 65-70). NaN stays NaN and counts as no test."""
    adjusted = [math.nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def shown_p(p: float) -> str:
    """Return a p for display, – if there is none."""
    if math.isnan(p):
        return "–"
    return f"{p:.4f}" if p >= 1e-4 else "< 0.0001"


def response_windows(
    values: Sequence[float], responses: Sequence[float], window: float = WINDOW_RESPONSES
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return (steps, means): the mean value of the last `window` responses at each step with at least that
    many up to it. A window consists of whole steps, as few as hold that many responses, so that methods with
    small groups are smoothed as much as those with large ones.

    Args:
        values: mean of a step's responses.
        responses: number of responses of each step.
    """
    counts_T = np.asarray(responses, np.float64)
    total_T = np.concatenate([[0.0], np.cumsum(counts_T)])
    weighted_T = np.concatenate([[0.0], np.cumsum(counts_T * np.asarray(values, np.float64))])
    ends = np.flatnonzero(total_T >= window)
    starts = np.searchsorted(total_T, total_T[ends] - window, side="right") - 1
    means = (weighted_T[ends] - weighted_T[starts]) / (total_T[ends] - total_T[starts])
    return ends - 1, means


def cost_to_reach(
    threshold: float,
    spent: Sequence[float],
    values: Sequence[float],
    responses: Sequence[float],
    window: float = WINDOW_RESPONSES,
) -> float:
    """Return the amount spent when the mean of the last `window` responses first reached `threshold`;
    infinite if it never did. Interpolates between two steps.

    Args:
        spent: running total at each step, ascending.
        values, responses: as in `response_windows`.
    """
    steps, means = response_windows(values, responses, window)
    at = np.asarray(spent, dtype=np.float64)[steps]
    reached = np.flatnonzero(means >= threshold)
    if not len(reached):
        return math.inf
    first = int(reached[0])
    if first == 0:
        return float(at[0])
    return float(np.interp(threshold, means[first - 1 : first + 1], at[first - 1 : first + 1]))


# ------------------------------------------------------------------------------------------------------ power

# The test is the paired t test over seeds. With n seeds and a difference d whose spread over seeds is σ, its
# power is the probability that Student's noncentral t of n - 1 degrees of freedom and noncentrality d √n / σ
# lies beyond the critical value (Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd ed. 1988,
# chapter 2).

POWER = 0.8
"""Probability of detecting a difference that exists."""
LEVEL = 0.05
"""Two-sided probability of detecting a difference that does not exist, over all methods together."""
TWO_POINTS = 0.02
"""Difference that a comparison should detect."""
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class PowerAnalysis:
    """Predictions from a pilot about a coming comparison."""

    source: str
    """Runs that the spread is estimated from."""
    spread: float
    """Standard deviation over seeds of the difference of two methods' accuracies."""
    degrees_of_freedom: int
    """Degrees of freedom of that estimate."""
    spread_at_most: float
    """Upper end of its one-sided 80 % interval: a pilot of few runs may have looked calm by luck."""
    difference: float
    """Difference to detect, as a share of the problems."""
    level: float
    """Level of one test: the least favourable of Holm's."""
    needed: int
    """Seeds that detect it with probability .8."""
    needed_at_most: int
    """The same with `spread_at_most`."""
    seeds: int
    """Seeds that the study has."""
    detectable: float
    """Difference that these detect with probability .8; infinite for one seed."""


def power(difference: float, spread: float, seeds: int, level: float = LEVEL) -> float:
    """Return the probability that a two-sided paired t test detects a difference.

    Args:
        spread: standard deviation of the paired differences over seeds.
    """
    if seeds < 2:
        return 0.0
    if spread == 0:
        return float(difference != 0)
    degrees = seeds - 1
    critical = stats.t.ppf(1 - level / 2, degrees)
    shift = abs(difference) * math.sqrt(seeds) / spread
    # scipy's nct gives NaN in its far lower tail, which is negligible beside the upper one
    below = np.nan_to_num(stats.nct.cdf(-critical, degrees, shift))
    return float(np.nan_to_num(stats.nct.sf(critical, degrees, shift), nan=1.0) + below)


def seeds_needed(difference: float, spread: float, level: float = LEVEL) -> int:
    """Return the fewest seeds for which `power` reaches .8; MOST_SEEDS if even these are too few."""
    enough = range(2, MOST_SEEDS)
    return 2 + bisect_left(enough, True, key=lambda seeds: power(difference, spread, seeds, level) >= POWER)


def detectable(spread: float, seeds: int, level: float = LEVEL) -> float:
    """Return the difference that this number of seeds detects with probability .8; infinite for one, and 0
    if no seed differs from another."""
    if seeds < 2:
        return math.inf
    if spread == 0:
        return 0.0
    high = spread
    while power(high, spread, seeds, level) < POWER:
        high *= 2
    return float(optimize.brentq(lambda difference: power(difference, spread, seeds, level) - POWER, 0, high))


def analyse(accuracies: Sequence[float], *, seeds: int, tests: int, source: str) -> PowerAnalysis | None:
    """Return the analysis of a pilot's runs; None for fewer than two.

    Args:
        accuracies: those of one method, one per seed. The difference of two methods is assumed to spread √2
            times as much, as if the seed affected both methods independently.
        seeds: number of seeds of the study.
        tests: number of methods that are compared with the baseline.
    """
    degrees = len(accuracies) - 1
    if degrees < 1:
        return None
    spread = float(np.std(accuracies, ddof=1)) * math.sqrt(2)
    at_most = spread * math.sqrt(degrees / stats.chi2.ppf(0.2, degrees))
    level = LEVEL / max(1, tests)
    return PowerAnalysis(
        source=source,
        spread=spread,
        degrees_of_freedom=degrees,
        spread_at_most=float(at_most),
        difference=TWO_POINTS,
        level=level,
        needed=seeds_needed(TWO_POINTS, spread, level),
        needed_at_most=seeds_needed(TWO_POINTS, float(at_most), level),
        seeds=seeds,
        detectable=detectable(spread, seeds, level),
    )


def in_words(pilot: PowerAnalysis) -> str:
    """Return the analysis in a sentence or two."""
    sees = "no difference, whatever its size" if math.isinf(pilot.detectable) else f"{pilot.detectable:.3f}"
    enough = pilot.seeds >= pilot.needed
    return (
        f"power, from {pilot.source}: the difference of two methods spreads by {pilot.spread:.4f} over seeds "
        f"(at most {pilot.spread_at_most:.4f}), so {pilot.difference:g} is seen with a chance of {POWER:g} "
        f"by {pilot.needed} seeds (at most {pilot.needed_at_most}), at a level of {pilot.level:.4f}. "
        f"The study has {pilot.seeds}, which see {sees}: {'enough' if enough else 'TOO FEW'}."
    )
