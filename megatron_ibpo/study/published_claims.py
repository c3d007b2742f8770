"""Claims of a publication, each beside what a study's runs say about it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ibpo.study.plan import PublishedClaim, Study
from megatron_ibpo.study.run_results import RunResult, cost_to_threshold
from megatron_ibpo.study.statistics import OverSeeds, holm, over_seeds

FEWEST_SEEDS = 5
"""Fewest seeds for saying that a claim is repeated or not."""
LEVEL = 0.05

Outcome = Literal["repeated", "not repeated", "undecided", "not run", "cannot be tested here"]
_Runs = Mapping[int, RunResult]


@dataclass(frozen=True)
class ClaimOutcome:
    """What the runs say about one claim."""

    claim: PublishedClaim
    outcome: Outcome
    """Repeated or not repeated: the runs show the claim, or its opposite, by the paired t test over seeds
    with Holm's adjustment over all claims tested."""
    seeds: int
    difference: OverSeeds | None
    """Above 0 where the runs lean towards the claim; in the unit of the measure."""
    holm_p: float


def judge_claims(study: Study, runs: Sequence[RunResult]) -> list[ClaimOutcome]:
    """Return the outcome of every claim of the study, in its order. A claim is tested over the seeds that
    both of its methods have."""
    values = [_differences(claim, study, runs) for claim in study.published_claims]
    tests = [over_seeds(of_claim) if of_claim else None for of_claim in values]
    adjusted = holm([math.nan if test is None else test.p for test in tests])
    return [
        ClaimOutcome(claim, _outcome(claim, len(of_claim), test, p), len(of_claim), test, p)
        for claim, of_claim, test, p in zip(study.published_claims, values, tests, adjusted, strict=True)
    ]


def _outcome(claim: PublishedClaim, seeds: int, test: OverSeeds | None, holm_p: float) -> Outcome:
    if claim.untestable:
        return "cannot be tested here"
    if test is None:
        return "not run"
    if seeds < FEWEST_SEEDS or not holm_p < LEVEL:
        return "undecided"
    return "repeated" if test.mean > 0 else "not repeated"


def _differences(claim: PublishedClaim, study: Study, runs: Sequence[RunResult]) -> list[float]:
    """Return one difference per seed; empty where nothing was run."""
    method, other = (
        {run.seed: run for run in runs if run.method == name} for name in (claim.method, claim.than)
    )
    return _MEASURES[claim.measure](method, other, study.threshold)


def _accuracy(method: _Runs, other: _Runs, _: float) -> list[float]:
    return [
        method[s].accuracy[-1][1] - other[s].accuracy[-1][1] for s in sorted(method.keys() & other.keys())
    ]


def _cost(method: _Runs, other: _Runs, threshold: float) -> list[float]:
    """Return log₂(cost to the threshold of the other, over that of the method). A run that never reached it
    counts as if it had at its end, which favours it; seeds where neither did are left out."""
    differences = []
    for seed in sorted(method.keys() & other.keys()):
        costs = [cost_to_threshold(of[seed], threshold) for of in (method, other)]
        if any(map(math.isfinite, costs)):
            first, second = (
                cost if math.isfinite(cost) else of[seed].reward[-1][0]
                for cost, of in zip(costs, (method, other), strict=True)
            )
            differences.append(math.log2(second / first))
    return differences


def _correction_success(method: _Runs, other: _Runs, threshold: float) -> list[float]:
    """Return the rise of the corrections' success from the first to the last five steps of a run."""
    pairs = [method[seed].correction_success for seed in sorted(method)]
    return [pair[1] - pair[0] for pair in pairs if pair]


_MEASURES: dict[str, Callable[[_Runs, _Runs, float], list[float]]] = {
    "accuracy": _accuracy,
    "cost to threshold": _cost,
    "correction success": _correction_success,
}


def read_claims(raw: Any, methods: Mapping[str, Any], where: str) -> tuple[PublishedClaim, ...]:
    """Return the claims of a study file.

    Raises:
        ValueError: a claim with missing or unknown keys, or with a method that the study does not have.
    """
    claims = []
    for number, entry in enumerate(raw, start=1):
        try:
            claim = PublishedClaim(**entry)
        except TypeError as error:
            raise ValueError(f"{where}: published-claims, number {number}: {error}") from error
        strangers = {claim.method, claim.than} - {"", *methods}
        if strangers or claim.measure not in _MEASURES or not (claim.method or claim.untestable):
            raise ValueError(
                f"{where}: published-claims, number {number}: must have a method of the study and may have "
                f"than (another), and a measure of {', '.join(_MEASURES)}; or untestable, the reason why"
            )
        claims.append(claim)
    return tuple(claims)
