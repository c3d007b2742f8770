"""What several samples of a prompt tell: pass@k, maj@k, best-of-k."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Outcomes = npt.NDArray[np.float64]
"""[P, n]: 1 correct, 0 wrong, NaN where the verifier failed."""


def pass_at(correct_PS: Outcomes, k: int) -> float | None:
    """Probability that at least one of k samples is correct: of each prompt the unbiased estimate
    1 - C(n-c, k) / C(n, k) from its n scored samples, of which c are correct (arXiv 2107.03374, eq. 1).

    Prompts with fewer than k scored samples are left out; None if all have.
    """
    known_P = (~np.isnan(correct_PS)).sum(axis=1)
    hits_P = np.nansum(correct_PS, axis=1)
    chances = [
        1 - math.comb(int(n - c), k) / math.comb(int(n), k)
        for n, c in zip(known_P, hits_P, strict=True)
        if n >= k
    ]
    return float(np.mean(chances)) if chances else None


def majority(correct_PS: Outcomes, answers: Sequence[Sequence[str | None]]) -> float:
    """maj@n: share of prompts whose most frequent answer is correct; of answers that are equally frequent
    the mean. None is no answer and has no vote; a prompt without any vote is answered wrongly."""
    return float(np.mean([_voted(*pair) for pair in zip(correct_PS, answers, strict=True)]))


def _voted(correct_S: Outcomes, answers: Sequence[str | None]) -> float:
    outcomes: dict[str, list[float]] = defaultdict(list)
    for outcome, answer in zip(correct_S, answers, strict=True):
        if answer is not None:
            outcomes[answer].append(outcome)
    most = max(map(len, outcomes.values()), default=0)
    winners = [np.array(own) for own in outcomes.values() if len(own) == most]
    # an answer that the verifier failed on each time is not known to be right
    scores = [float(np.nanmean(own)) if not np.isnan(own).all() else 0.0 for own in winners]
    return float(np.mean(scores)) if scores else 0.0


def best_of(correct_PS: Outcomes, scores_PS: npt.NDArray[np.float64]) -> float:
    """Share of prompts whose sample with the highest score is correct; one that the verifier failed on is
    not known to be."""
    best_P = scores_PS.argmax(axis=1)
    return float(np.mean(np.nan_to_num(np.take_along_axis(correct_PS, best_P[:, None], axis=1))))
