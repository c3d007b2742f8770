"""Measures of several samples of a prompt: pass@k, maj@k, best-of-k; intervals over prompts.

Each measure is first computed for every prompt; the mean over prompts is the measure. Intervals and
comparisons resample prompts, since samples of one prompt are not independent.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Outcomes = npt.NDArray[np.float64]
"""1 for correct, 0 for wrong, NaN where the verifier failed: [P, S] for all samples, or [P] for a measure by
prompt."""

_RESAMPLES = 2000


def pass_at(correct_PS: Outcomes, k: int) -> Outcomes:
    """Return the probability that at least one of k samples is correct. For each prompt it is the unbiased
    estimate 1 - C(n-c, k) / C(n, k) from its n scored samples, c of them correct (arXiv 2107.03374, eq. 1).

    NaN for prompts with fewer than k scored samples.
    """
    known_P = (~np.isnan(correct_PS)).sum(axis=1)
    hits_P = np.nansum(correct_PS, axis=1)
    chances = [
        1 - math.comb(int(n - c), k) / math.comb(int(n), k) if n >= k else math.nan
        for n, c in zip(known_P, hits_P, strict=True)
    ]
    return np.array(chances)


def majority(correct_PS: Outcomes, answers: Sequence[Sequence[str | None]]) -> Outcomes:
    """Return maj@n (arXiv 2203.11171): whether a prompt's most frequent answer is correct, or the mean over
    equally frequent answers. None and "" count as no answer and have no vote; a prompt without any vote
    counts as wrong."""
    return np.array([_voted(*pair) for pair in zip(correct_PS, answers, strict=True)])


def _voted(correct_S: Outcomes, answers: Sequence[str | None]) -> float:
    outcomes: dict[str, list[float]] = defaultdict(list)
    for outcome, answer in zip(correct_S, answers, strict=True):
        if answer:
            outcomes[answer].append(outcome)
    largest = max(map(len, outcomes.values()), default=0)
    winners = [np.array(votes) for votes in outcomes.values() if len(votes) == largest]
    # an answer whose verifier failed every time does not count as right
    scores = [float(np.nanmean(votes)) if not np.isnan(votes).all() else 0.0 for votes in winners]
    return float(np.mean(scores)) if scores else 0.0


def best_of(correct_PS: Outcomes, scores_PS: npt.NDArray[np.float64]) -> Outcomes:
    """Return whether a prompt's sample with the highest score is correct. If its verifier failed, it does not
    count as correct."""
    best_P = scores_PS.argmax(axis=1)
    return np.nan_to_num(np.take_along_axis(correct_PS, best_P[:, None], axis=1))[:, 0]


def mean_over_prompts(values_P: Outcomes) -> float | None:
    """Return the mean over the prompts whose value is known; None if none is."""
    scored = values_P[~np.isnan(values_P)]
    return float(scored.mean()) if scored.size else None


def interval(correct_PS: Outcomes) -> tuple[float, float]:
    """Return the 95 % interval of the mean of all outcomes: Wilson's for one sample per prompt. For more,
    prompts are resampled (percentile bootstrap), because samples of a prompt are not independent."""
    if correct_PS.shape[1] == 1:
        scored = correct_PS[~np.isnan(correct_PS)]
        return wilson(float(scored.mean()), len(scored))
    hits_P = np.nansum(correct_PS, axis=1)
    known_P = (~np.isnan(correct_PS)).sum(axis=1)
    draw = np.random.default_rng(0).integers(len(hits_P), size=(_RESAMPLES, len(hits_P)))
    num_scored = known_P[draw].sum(axis=1)
    means = hits_P[draw].sum(axis=1)[num_scored > 0] / num_scored[num_scored > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def interval_over_prompts(values_P: Outcomes) -> tuple[float, float]:
    """Return the 95 % interval of a measure's mean over prompts. If all values are 0 or 1, it is Wilson's, so
    that a few prompts without a failure do not look certain. Otherwise prompts are resampled (percentile
    bootstrap)."""
    scored = values_P[~np.isnan(values_P)]
    if np.isin(scored, (0.0, 1.0)).all():
        return wilson(float(scored.mean()), len(scored))
    draw = np.random.default_rng(0).integers(len(scored), size=(_RESAMPLES, len(scored)))
    low, high = np.quantile(scored[draw].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval, 95 %, of a share of `count` independent trials."""
    z2 = 1.959964**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * count)) / count) / (1 + z2 / count)
    return center - half, center + half
