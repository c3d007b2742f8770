"""The claims that a study supports about its methods, and the objections to them; and the accuracy of two
methods after an equal amount of what they spend, in several currencies."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np

from megatron_ibpo.basics.text import counted
from megatron_ibpo.run.cost import DECODING_PRICE
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
    """Return one difference per seed, the mean over the claim's tasks; empty where nothing was run. Seeds
    without a difference on one of the tasks are left out."""
    tasks = [claim.task] if claim.task else [task.name for task in study.tasks]
    by_task = []
    for task in tasks:
        method, baseline = (
            {run.seed: run for run in runs if (run.task, run.method) == (task, name)}
            for name in (claim.method, claim.than)
        )
        by_task.append(_MEASURES[claim.measure](method, baseline, study.threshold))
    seeds = sorted(set.intersection(*map(set, by_task)))
    return [fmean(differences[seed] for differences in by_task) for seed in seeds]


def _accuracy(
    of_run: Callable[[RunResult], float], method: _Runs, baseline: _Runs, _: float
) -> dict[int, float]:
    both = method.keys() & baseline.keys()
    return {seed: of_run(method[seed]) - of_run(baseline[seed]) for seed in both}


def _cost(method: _Runs, baseline: _Runs, threshold: float) -> dict[int, float]:
    """Return log₂(cost to the threshold of the baseline, over that of the method). A run that never reached
    it counts as if it had at its end, which favours it; seeds where neither did are left out."""
    differences = {}
    for seed in sorted(method.keys() & baseline.keys()):
        costs = [cost_to_threshold(runs[seed], threshold) for runs in (method, baseline)]
        if any(map(math.isfinite, costs)):
            first, second = (
                cost if math.isfinite(cost) else runs[seed].reward[-1][0]
                for cost, runs in zip(costs, (method, baseline), strict=True)
            )
            differences[seed] = math.log2(second / first)
    return differences


def _correction_success(method: _Runs, baseline: _Runs, threshold: float) -> dict[int, float]:
    """Return the rise of the corrections' success from the first to the last five steps of a run."""
    pairs = {seed: run.correction_success for seed, run in method.items()}
    return {seed: pair[1] - pair[0] for seed, pair in pairs.items() if pair}


_MEASURES: dict[str, Callable[[_Runs, _Runs, float], dict[int, float]]] = {
    "accuracy": partial(_accuracy, lambda run: run.accuracy[-1][1]),
    "greedy accuracy": partial(_accuracy, lambda run: run.greedy),
    "cost to threshold": _cost,
    "correction success": _correction_success,
}


def read_claims(
    raw: Any, methods: Mapping[str, Any], tasks: Sequence[str], location: str
) -> tuple[PublishedClaim, ...]:
    """Return the claims of a study file. Raises ValueError if a claim has missing or unknown keys, or a
    method or task that the study does not have."""
    claims = []
    for number, entry in enumerate(raw, start=1):
        try:
            claim = PublishedClaim(**entry)
        except TypeError as error:
            raise ValueError(f"{location}: published-claims, number {number}: {error}") from error
        strangers = ({claim.method, claim.than} - {"", *methods}) | ({claim.task} - {"", *tasks})
        if strangers or claim.measure not in _MEASURES or not (claim.method or claim.untestable):
            raise ValueError(
                f"{location}: published-claims, number {number}: must have a method of the study and may "
                f"have than (another), a task of it, and a measure of {', '.join(_MEASURES)}; or untestable, "
                "the reason why"
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
    """All tables that follow from a study's findings, with the lines of `compare`, `compare_overall`,
    `compare_at_equal_steps` and `compare_at_equal_amounts`."""

    table: list[dict[str, Any]]
    overall: list[dict[str, Any]]
    equal_steps: list[dict[str, Any]]
    equal_amounts: list[dict[str, Any]]
    dose_response: list[dict[str, Any]]
    claims: list[Claim]
    """One claim for each method but the baseline, by the paired t test over seeds, with Holm's adjustment
    over the methods."""
    published: list[ClaimOutcome] = field(default_factory=list)
    """Outcome of each claim of a publication that the study tests."""


def compare_all(findings: Findings) -> Comparison:
    """Return all tables. The baseline must have runs. Raises ValueError if it has none, or runs of a task
    were tested on different problems."""
    study, runs = findings.study, findings.runs
    lines = compare(study, runs)
    confirmed = _differences(study, findings.confirmation)
    return Comparison(
        table=lines,
        overall=compare_overall(study, runs),
        equal_steps=compare_at_equal_steps(study, runs),
        equal_amounts=compare_at_equal_amounts(study, runs),
        dose_response=dose_response(study, runs, lines),
        claims=[
            _claim(method, difference, findings, confirmed)
            for method, difference in _differences(study, runs).items()
        ],
        published=judge_claims(study, runs),
    )


def winners(findings: Findings) -> list[str]:
    """Return the methods that the study's own seeds show to be better than the baseline."""
    differences = _differences(findings.study, findings.runs)
    return [method for method, difference in differences.items() if _verdict(difference) == "better"]


def _differences(study: Study, runs: Sequence[RunResult]) -> dict[str, dict[str, Any]]:
    """Return each method's mean difference over seeds and its tests: over all tasks, or for the only one."""
    lines = (compare_overall(study, runs) or compare(study, runs)) if runs else []
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
    tune, pair = findings.study.tune, (method, findings.study.baseline)
    if tune is None:
        blocks.append("nothing was tuned")
    elif untuned := [name for name in pair if tune.methods and name not in tune.methods]:
        blocks.append(f"not tuned: {', '.join(untuned)}")
    elif not findings.choices:
        blocks.append("what tuning tried was not kept")
    for choice in findings.choices:
        if choice.method in pair and choice.at_edge:
            of_task = f" on {choice.task}" if choice.task else ""
            blocks.append(
                f"the best {' and '.join(choice.at_edge)} of {choice.method}{of_task} is at the edge of "
                "its grid"
            )
    fresh = confirmed.get(method)
    if verdict == "better" and fresh is None:
        blocks.append("not run again with fresh seeds")
    elif verdict == "better" and fresh is not None and _verdict(fresh) != "better":
        blocks.append(f"fresh seeds do not show it: {fresh['mean']:+.3f}, p {fresh['holm_p']:.3f}")
    return Claim(method, verdict, tuple(blocks))


Points = list[tuple[float, float]]

_FEWEST_EVALUATIONS = 3


def compare_at_equal_amounts(study: Study, results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return for each task, method and currency the accuracy on held-out problems of the method and of the
    baseline after the same amount, with intervals over the seeds that both have.

    The amount is the largest that every run of both has spent. Accuracy is interpolated between evaluations,
    so there is no line where a run has fewer than three, or no record of the currency.
    """
    lines = []
    for task in study.tasks:
        runs = {(run.method, run.seed): run for run in results if run.task == task.name}
        for method in study.methods:
            seeds = sorted(seed for name, seed in runs if name == method and (study.baseline, seed) in runs)
            if method == study.baseline or not seeds:
                continue
            pairs = [(runs[method, seed], runs[study.baseline, seed]) for seed in seeds]
            for currency in _amounts(study, pairs[0][0]):
                line = _line([[_curve(study, run, currency) for run in pair] for pair in pairs])
                if line is not None:
                    lines.append({"task": task.name, "method": method, "currency": currency} | line)
    return lines


def _line(curves_SM: Sequence[Sequence[Points]]) -> dict[str, Any] | None:
    if any(len(curve) < _FEWEST_EVALUATIONS for pair in curves_SM for curve in pair):
        return None
    amount = min(curve[-1][0] for pair in curves_SM for curve in pair)
    accuracy_SM = np.array(
        [[np.interp(amount, *np.transpose(curve)) for curve in pair] for pair in curves_SM]
    )
    return {
        "amount": float(amount),
        "seeds": len(curves_SM),
        "accuracy": asdict(estimate(accuracy_SM[:, 0])),
        "baseline_accuracy": asdict(estimate(accuracy_SM[:, 1])),
        "difference": asdict(estimate(accuracy_SM[:, 0] - accuracy_SM[:, 1])),
    }


def _curve(study: Study, run: RunResult, currency: str) -> Points:
    """Return (amount, accuracy) of each evaluation; empty if the run has no record of the currency."""
    amounts = _amounts(study, run)[currency]
    if len(amounts) != len(run.reward):
        return []
    spent = [0.0, *(spent for spent, _ in run.reward)]
    steps = np.searchsorted(spent, [at for at, _ in run.accuracy], side="right") - 1
    return [
        ([0.0, *amounts][step], accuracy) for step, (_, accuracy) in zip(steps, run.accuracy, strict=True)
    ]


def _amounts(study: Study, run: RunResult) -> dict[str, Sequence[float]]:
    """Return the amounts spent up to each step of `run.reward`, by currency, the budget's first."""
    return {
        study.unit_in_words: [spent for spent, _ in run.reward],
        f"operations, decoding x {DECODING_PRICE}": run.dear_decoding,
        "steps": range(1, len(run.reward) + 1),
        "accelerator seconds": run.accelerator_seconds,
    }
