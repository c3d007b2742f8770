"""The claims that a study supports about its methods, and the objections to them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_ibpo.basics.text import counted
from megatron_ibpo.study.equal_amounts import compare_at_equal_amounts
from megatron_ibpo.study.findings import Findings
from megatron_ibpo.study.plan import PublishedClaim, Study
from megatron_ibpo.study.run_results import (
    RunResult,
    compare,
    compare_at_equal_steps,
    compare_overall,
    cost_to_threshold,
    dose_response,
)
from megatron_ibpo.study.statistics import Estimate, estimate, holm

SEEDS_TO_REPEAT = 5
"""Fewest seeds for saying that a claim is repeated or not."""
LEVEL = 0.05

Outcome = Literal["repeated", "not repeated", "undecided", "not run", "cannot be tested here"]
_Runs = Mapping[int, RunResult]


@dataclass(frozen=True)
class ClaimOutcome:
    """The outcome of one claim, by the runs."""

    claim: PublishedClaim
    outcome: Outcome
    """Repeated or not repeated: the runs show the claim, or its opposite, by the paired t test over seeds
    with Holm's adjustment over all claims tested."""
    seeds: int
    difference: Estimate | None
    """Above 0 where the runs lean towards the claim; in the unit of the measure."""
    holm_p: float


def judge_claims(study: Study, runs: Sequence[RunResult]) -> list[ClaimOutcome]:
    """Return the outcome of every claim of the study, in its order. A claim is tested over the seeds that
    both of its methods have."""
    values = [_differences_per_seed(claim, study, runs) for claim in study.published_claims]
    tests = [estimate(of_claim) if of_claim else None for of_claim in values]
    adjusted = holm([math.nan if test is None else test.p for test in tests])
    return [
        ClaimOutcome(claim, _outcome(claim, len(of_claim), test, p), len(of_claim), test, p)
        for claim, of_claim, test, p in zip(study.published_claims, values, tests, adjusted, strict=True)
    ]


def _outcome(claim: PublishedClaim, seeds: int, test: Estimate | None, holm_p: float) -> Outcome:
    if claim.untestable:
        return "cannot be tested here"
    if test is None:
        return "not run"
    if seeds < SEEDS_TO_REPEAT or not holm_p < LEVEL:
        return "undecided"
    return "repeated" if test.mean > 0 else "not repeated"


def _differences_per_seed(claim: PublishedClaim, study: Study, runs: Sequence[RunResult]) -> list[float]:
    """Return one difference per seed; empty where nothing was run."""
    method, baseline = (
        {run.seed: run for run in runs if run.method == name} for name in (claim.method, claim.than)
    )
    return _MEASURES[claim.measure](method, baseline, study.threshold)


def _accuracy(method: _Runs, baseline: _Runs, _: float) -> list[float]:
    return [
        method[s].accuracy[-1][1] - baseline[s].accuracy[-1][1]
        for s in sorted(method.keys() & baseline.keys())
    ]


def _cost(method: _Runs, baseline: _Runs, threshold: float) -> list[float]:
    """Return log₂(cost to the threshold of the baseline, over that of the method). A run that never reached
    it counts as if it had at its end, which favours it; seeds where neither did are left out."""
    differences = []
    for seed in sorted(method.keys() & baseline.keys()):
        costs = [cost_to_threshold(runs[seed], threshold) for runs in (method, baseline)]
        if any(map(math.isfinite, costs)):
            first, second = (
                cost if math.isfinite(cost) else runs[seed].reward[-1][0]
                for cost, runs in zip(costs, (method, baseline), strict=True)
            )
            differences.append(math.log2(second / first))
    return differences


def _correction_success(method: _Runs, baseline: _Runs, threshold: float) -> list[float]:
    """Return the rise of the corrections' success from the first to the last five steps of a run."""
    pairs = [method[seed].correction_success for seed in sorted(method)]
    return [pair[1] - pair[0] for pair in pairs if pair]


_MEASURES: dict[str, Callable[[_Runs, _Runs, float], list[float]]] = {
    "accuracy": _accuracy,
    "cost to threshold": _cost,
    "correction success": _correction_success,
}


def read_claims(raw: Any, methods: Mapping[str, Any], location: str) -> tuple[PublishedClaim, ...]:
    """Return the claims of a study file.

    Raises:
        ValueError: a claim with missing or unknown keys, or with a method that the study does not have.
    """
    claims = []
    for number, entry in enumerate(raw, start=1):
        try:
            claim = PublishedClaim(**entry)
        except TypeError as error:
            raise ValueError(f"{location}: published-claims, number {number}: {error}") from error
        strangers = {claim.method, claim.than} - {"", *methods}
        if strangers or claim.measure not in _MEASURES or not (claim.method or claim.untestable):
            raise ValueError(
                f"{location}: published-claims, number {number}: must have a method of the study and may "
                f"have than (another), and a measure of {', '.join(_MEASURES)}; or untestable, the reason why"
            )
        claims.append(claim)
    return tuple(claims)


FEWEST_SEEDS = 8
"""Fewest seeds for a claim. With fewer, one lucky seed decides, and intervals are too short."""


@dataclass(frozen=True)
class Claim:
    """The result of one method against the baseline, over all tasks."""

    method: str
    verdict: str
    """better, worse, differs between tasks, not told apart, or no test."""
    blocks: tuple[str, ...]
    """Reasons why better or worse is not a claim yet; empty if it is."""


@dataclass(frozen=True)
class Comparison:
    """All tables that follow from a study's findings."""

    table: list[dict[str, Any]]
    """Result of `compare`."""
    overall: list[dict[str, Any]]
    """Result of `compare_overall`."""
    equal_steps: list[dict[str, Any]]
    """Result of `compare_at_equal_steps`."""
    equal_amounts: list[dict[str, Any]]
    """Result of `compare_at_equal_amounts`."""
    dose_response: list[dict[str, Any]]
    claims: list[Claim]
    """One claim for each method but the baseline, by the paired t test over seeds, with Holm's adjustment
    over the methods."""
    published: list[ClaimOutcome] = field(default_factory=list)
    """Outcome of each claim of a publication that the study tests."""


def compare_all(findings: Findings) -> Comparison:
    """Return all tables. The baseline must have runs.

    Raises:
        ValueError: it has none, or runs of a task were tested on different problems.
    """
    study, runs = findings.study, findings.runs
    lines, overall = compare(study, runs), compare_overall(study, runs)
    confirmed = _confirmed(findings)
    return Comparison(
        table=lines,
        overall=overall,
        equal_steps=compare_at_equal_steps(study, runs),
        equal_amounts=compare_at_equal_amounts(study, runs),
        dose_response=dose_response(study, runs, lines),
        claims=[
            _claim(method, difference, findings, confirmed)
            for method, difference in _differences(overall or lines).items()
        ],
        published=judge_claims(study, runs),
    )


def winners(findings: Findings) -> list[str]:
    """Return the methods that the study's own seeds show to be better than the baseline."""
    lines = compare_overall(findings.study, findings.runs) or compare(findings.study, findings.runs)
    return [method for method, difference in _differences(lines).items() if _verdict(difference) == "better"]


def _differences(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each method's mean difference over seeds and its tests: over all tasks, or for the only one."""
    return {line["method"]: line["difference"] for line in lines if "difference" in line}


def _verdict(difference: dict[str, Any]) -> str:
    if math.isnan(difference["holm_p"]):
        return "no test"
    if _changes_sign(difference) and difference["interaction_p"] < LEVEL:
        return "differs between tasks"
    if difference["holm_p"] >= LEVEL:
        return "not told apart"
    return "better" if difference["mean"] > 0 else "worse"


def _changes_sign(difference: dict[str, Any]) -> bool:
    """Return whether the method gains on some tasks and loses on others."""
    by_task = difference.get("by_task", [])
    return bool(by_task) and min(by_task) < 0 < max(by_task)


def _confirmed(findings: Findings) -> dict[str, dict[str, Any]]:
    """Return the difference of each method that was run again with fresh seeds."""
    if not findings.confirmation:
        return {}
    runs = findings.confirmation
    return _differences(compare_overall(findings.study, runs) or compare(findings.study, runs))


def _claim(
    method: str, difference: dict[str, Any], findings: Findings, confirmed: dict[str, dict[str, Any]]
) -> Claim:
    verdict = _verdict(difference)
    if verdict not in ("better", "worse"):
        return Claim(method, verdict, ())
    blocks = []
    if _changes_sign(difference):
        blocks.append("it gains on some tasks and loses on others")
    if findings.runs_left:
        blocks.append(f"{counted(findings.runs_left, 'run')} to go")
    seeds = len({run.seed for run in findings.runs if run.method == method})
    if seeds < FEWEST_SEEDS:
        blocks.append(f"{seeds} seeds, {FEWEST_SEEDS} are needed")
    tune = findings.study.tune
    untuned = (
        []
        if tune is None or not tune.methods
        else [name for name in (method, findings.study.baseline) if name not in tune.methods]
    )
    if tune is None:
        blocks.append("nothing was tuned")
    elif untuned:
        blocks.append(f"not tuned: {', '.join(untuned)}")
    elif not findings.choices:
        blocks.append("what tuning tried was not kept")
    for choice in findings.choices:
        if choice.method in (method, findings.study.baseline) and choice.at_edge:
            of_task = f" on {choice.task}" if choice.task else ""
            blocks.append(
                f"the best {' and '.join(choice.at_edge)} of {choice.method}{of_task} is at the edge of "
                "its grid"
            )
    if verdict == "better":
        blocks += _fresh(confirmed.get(method))
    return Claim(method, verdict, tuple(blocks))


def _fresh(confirmation: dict[str, Any] | None) -> list[str]:
    if confirmation is None:
        return ["not run again with fresh seeds"]
    if _verdict(confirmation) == "better":
        return []
    return [f"fresh seeds do not show it: {confirmation['mean']:+.3f}, p {confirmation['holm_p']:.3f}"]
