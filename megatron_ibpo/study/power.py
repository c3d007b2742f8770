"""Number of seeds that a comparison needs to detect a difference, from the spread in a pilot.

The test is the paired t test over seeds. With n seeds and a difference d whose spread over seeds is σ, its
power is the probability that Student's noncentral t of n - 1 degrees of freedom and noncentrality d √n / σ
lies beyond the critical value (Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd ed. 1988,
chapter 2).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

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
    """Return the analysis of a pilot's runs.

    Args:
        accuracies: those of one method, one per seed. The difference of two methods is assumed to spread √2
            times as much, as if the seed affected both methods independently.
        seeds: number of seeds of the study.
        tests: number of methods that are compared with the baseline.

    Returns:
        None for fewer than two runs.
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
