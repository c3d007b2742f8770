"""How many seeds a comparison needs to see a difference, from the spread that a pilot shows.

The test is the paired t test over seeds. With n seeds and a difference d whose spread over seeds is σ it
finds something with the chance that Student's noncentral t of n - 1 degrees of freedom and noncentrality
d √n / σ lies beyond the critical value (Cohen, Statistical Power Analysis for the Behavioral Sciences, 2nd
ed. 1988, chapter 2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

POWER = 0.8
"""Chance to see the difference where it is there."""
LEVEL = 0.05
"""Two-sided chance to see one where there is none, over all methods together."""
TWO_POINTS = 0.02
"""The difference that a comparison is to see."""
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class PowerAnalysis:
    """What a pilot says of a comparison that is to come."""

    source: str
    """Which runs the spread is from."""
    spread: float
    """Standard deviation over seeds of the difference of two methods' accuracies."""
    degrees_of_freedom: int
    """Of its estimate."""
    spread_at_most: float
    """Upper end of its one-sided 80 % interval: a pilot of few runs may have looked calm by luck."""
    difference: float
    """That is to be seen, as a share of the problems."""
    level: float
    """Of one test: the least favourable of Holm's."""
    needed: int
    """Seeds with which it is seen with a chance of .8."""
    needed_at_most: int
    """The same with `spread_at_most`."""
    seeds: int
    """That the study has."""
    detectable: float
    """The difference that these see with a chance of .8; infinite for one seed."""


def power(difference: float, spread: float, seeds: int, level: float = LEVEL) -> float:
    """Chance that a two-sided paired t test sees a difference.

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
    # scipy's nct loses its far lower tail, which is nothing beside the upper one
    below = np.nan_to_num(stats.nct.cdf(-critical, degrees, shift))
    return float(np.nan_to_num(stats.nct.sf(critical, degrees, shift), nan=1.0) + below)


def seeds_needed(difference: float, spread: float, level: float = LEVEL) -> int:
    """The fewest seeds with which `power` reaches .8; MOST_SEEDS where even these do not."""
    few, many = 1, 2
    while power(difference, spread, many, level) < POWER:
        if many >= MOST_SEEDS:
            return MOST_SEEDS
        few, many = many, min(2 * many, MOST_SEEDS)
    while many - few > 1:  # `few` is too few, `many` enough
        middle = (few + many) // 2
        few, many = (few, middle) if power(difference, spread, middle, level) >= POWER else (middle, many)
    return many


def detectable(spread: float, seeds: int, level: float = LEVEL) -> float:
    """The difference that so many seeds see with a chance of .8; infinite for one."""
    if seeds < 2:
        return math.inf
    low, high = 0.0, spread
    while power(high, spread, seeds, level) < POWER:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, spread, seeds, level) >= POWER else (middle, high)
    return high


def analyse(
    groups: Sequence[Sequence[float]], *, paired: bool, seeds: int, tests: int, source: str
) -> PowerAnalysis | None:
    """The analysis from the runs of a pilot.

    Args:
        groups: lists of values over seeds that differ by their seed alone. Their variances are pooled.
        paired: the values are differences of two methods on one seed. If not, they are accuracies of one
            method, and the difference of two is taken to spread √2 times as much, as it does where the seed
            brings both the same luck in nothing.
        seeds: of the study.
        tests: methods that are compared with the baseline.

    Returns:
        None where no group has two values.
    """
    groups = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in groups)
    if not degrees:
        return None
    variance = sum(float(np.var(group, ddof=1)) * (len(group) - 1) for group in groups) / degrees
    spread = math.sqrt(variance * (1 if paired else 2))
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


def in_words(found: PowerAnalysis) -> str:
    """The analysis in a sentence or two."""
    sees = "no difference, whatever its size" if math.isinf(found.detectable) else f"{found.detectable:.3f}"
    enough = found.seeds >= found.needed
    return (
        f"power, from {found.source}: the difference of two methods spreads by {found.spread:.4f} over seeds "
        f"(at most {found.spread_at_most:.4f}), so {found.difference:g} is seen with a chance of {POWER:g} "
        f"by {found.needed} seeds (at most {found.needed_at_most}), at a level of {found.level:.4f}. "
        f"The study has {found.seeds}, which see {sees}: {'enough' if enough else 'TOO FEW'}."
    )
