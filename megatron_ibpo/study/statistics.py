"""Statistics of a comparison of methods: intervals and tests over seeds and held-out problems.

Every method is trained with the same seeds and tested on the same problems, so outcomes form a matrix [seeds,
problems] per method, and two methods are paired entry by entry. Both seeds and problems are samples, so both
are resampled. A problem is drawn for all seeds at once, because all seeds are tested on it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]

RESAMPLES = 4000
PICKED_AT_ONCE = 2**22
"""Most values in memory at one time: 32 MB."""
LEVEL = 0.95
WINDOW_RESPONSES = 640
"""Responses over which a training reward is averaged: five steps of 16 prompts with 8 responses."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class OverSeeds(Estimate):
    """A mean over seeds, its interval by Student's t, and the test that it is 0."""

    p: float
    """Two-sided p; NaN for one seed, which has no spread."""
    spread: float
    """Standard deviation over seeds; NaN for one seed."""


@dataclass(frozen=True)
class Difference(Estimate):
    """Paired difference of two methods."""

    over_seeds: OverSeeds
    """The difference of each seed's mean, with the paired t test."""
    bootstrap_p: float
    """Two-sided p of no difference: twice the share of resamples on the other side of 0. It depends only on
    the seeds at hand, and with few of them it is far too small: never use it alone as evidence."""
    bootstrap_floor: float
    """Smallest p that this number of resamples can give."""
    sign_flip_p: float
    """Two-sided and exact p over seeds alone. With no difference, each seed's sign is a coin toss."""
    sign_flip_floor: float
    """Smallest p that this number of seeds can give: 2 / 2^seeds."""


def mean_with_interval(solved_SP: Array) -> Estimate:
    """Return the mean accuracy and its interval over seeds and problems.

    Args:
        solved_SP: share of correct responses of each seed's run on each problem; NaN where unknown. With one
            seed the interval is over problems alone.

    Raises:
        ValueError: fewer than two problems.
    """
    low, high, _ = _resample(solved_SP)
    return Estimate(float(np.nanmean(solved_SP)), low, high)


def paired_difference(method_SP: Array, baseline_SP: Array) -> Difference:
    """Return method minus baseline, with the same seeds and problems in the same order.

    Raises:
        ValueError: the shapes differ, or there are fewer than two problems.
    """
    if method_SP.shape != baseline_SP.shape:
        raise ValueError(f"not paired: {method_SP.shape} outcomes against {baseline_SP.shape}")
    difference_SP = method_SP - baseline_SP
    low, high, resampled = _resample(difference_SP)
    below, above = int((resampled <= 0).sum()), int((resampled >= 0).sum())
    seeds = len(difference_SP)
    return Difference(
        mean=float(np.nanmean(difference_SP)),
        low=low,
        high=high,
        over_seeds=over_seeds(np.nanmean(difference_SP, axis=1)),
        bootstrap_p=min(1.0, 2 * (min(below, above) + 1) / (len(resampled) + 1)),
        bootstrap_floor=2 / (len(resampled) + 1),
        sign_flip_p=sign_flip_p(np.nanmean(method_SP, axis=1), np.nanmean(baseline_SP, axis=1)),
        sign_flip_floor=2 / 2**seeds,
    )


def over_seeds(values_S: Array | Sequence[float]) -> OverSeeds:
    """Return the mean of one value per seed, with Student's t. For paired differences this is the paired t
    test."""
    values_S = np.asarray(values_S, dtype=np.float64)
    mean = float(values_S.mean())
    if len(values_S) < 2:
        return OverSeeds(mean, math.nan, math.nan, math.nan, math.nan)
    if np.ptp(values_S) < 1e-9:  # equal up to rounding: scipy warns, or returns NaN
        return OverSeeds(mean, mean, mean, float(abs(mean) < 1e-9), 0.0)
    found = stats.ttest_1samp(values_S, 0.0)
    interval = found.confidence_interval(LEVEL)
    spread = float(values_S.std(ddof=1))
    return OverSeeds(mean, float(interval.low), float(interval.high), float(found.pvalue), spread)


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


def shown_p(p: float, floor: float | None = None) -> str:
    """Return a p for display: `≤ FLOOR` at the smallest p that the method can give, – if there is none."""
    if math.isnan(p):
        return "–"
    if floor is not None and p <= floor:
        return f"≤ {floor:.4f}"
    return f"{p:.4f}" if p >= 1e-4 else "< 0.0001"


def _resample(values_SP: Array) -> tuple[float, float, Array]:
    """Return (low, high, resampled means) of the mean over resampled seeds and problems."""
    seeds, problems = values_SP.shape
    if problems < 2:
        raise ValueError(f"an interval over problems needs two of them, there is {problems}")
    # one seed cannot be resampled
    samples = (np.arange(seeds), np.arange(problems)) if seeds > 1 else (np.arange(problems),)

    def means(*chosen: npt.NDArray[np.int64], axis: int) -> Array:
        """Return the mean of each resample; the last axis of `chosen` holds its numbers."""
        problem_numbers = np.atleast_2d(chosen[-1])
        seed_numbers = np.atleast_2d(chosen[0]) if seeds > 1 else np.zeros((len(problem_numbers), 1), int)
        parts = -(-len(problem_numbers) * values_SP.size // PICKED_AT_ONCE)
        found = [
            np.nanmean(values_SP[s[:, :, None], p[:, None, :]], axis=(1, 2))
            for s, p in zip(
                np.array_split(seed_numbers, parts), np.array_split(problem_numbers, parts), strict=True
            )
        ]
        return np.concatenate(found).reshape(chosen[-1].shape[:-1])

    found = stats.bootstrap(
        samples,
        means,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    interval = found.confidence_interval
    return float(interval.low), float(interval.high), found.bootstrap_distribution


def sign_flip_p(method_S: Array, baseline_S: Array) -> float:
    """Return the two-sided p of equal means of paired values, with each pair's order as a coin toss. Exact up
    to 16 pairs, from 65,536 random tosses beyond."""
    if len(method_S) < 2:
        return 1.0
    found = stats.permutation_test(
        (method_S, baseline_S),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**16,  # exact up to 16 pairs
        batch=2**10,  # otherwise thousands of pairs would take gigabytes
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def response_windows(
    values: Sequence[float], responses: Sequence[float], window: float = WINDOW_RESPONSES
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return (steps, means): the mean value of the last `window` responses at each step that has so many
    before it. A window has whole steps, as few as hold so many responses, so that methods with small groups
    are smoothed as much as those with large ones.

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
