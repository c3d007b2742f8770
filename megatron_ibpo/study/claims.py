"""The claims that a study supports about its methods, and the objections to them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ibpo.basics.text import counted
from megatron_ibpo.study.equal_amounts import compare_at_equal_amounts
from megatron_ibpo.study.findings import Findings
from megatron_ibpo.study.published_claims import ClaimOutcome, judge_claims
from megatron_ibpo.study.run_results import compare, compare_at_equal_steps, compare_overall, dose_response

LEVEL = 0.05
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
    over the methods. Bootstrap p values are not used."""
    published: list[ClaimOutcome] = field(default_factory=list)
    """Outcome of each claim of a publication that the study tests."""


def compare_all(found: Findings) -> Comparison:
    """Return all tables. The baseline must have runs.

    Raises:
        ValueError: it has none, or runs of a task were tested on different problems.
    """
    study, runs = found.study, found.runs
    lines, overall = compare(study, runs), compare_overall(study, runs)
    confirmed = _confirmed(found)
    return Comparison(
        table=lines,
        overall=overall,
        equal_steps=compare_at_equal_steps(study, runs),
        equal_amounts=compare_at_equal_amounts(study, runs),
        dose_response=dose_response(study, runs, lines),
        claims=[
            _claim(method, difference, found, confirmed)
            for method, difference in _differences(overall or lines).items()
        ],
        published=judge_claims(study, runs),
    )


def winners(found: Findings) -> list[str]:
    """Return the methods that the study's own seeds show to be better than the baseline."""
    lines = compare_overall(found.study, found.runs) or compare(found.study, found.runs)
    return [method for method, difference in _differences(lines).items() if _verdict(difference) == "better"]


def _differences(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each method's mean difference over seeds and its tests: over all tasks, or for the only one."""
    found = {line["method"]: line["difference"] for line in lines if "difference" in line}
    return {method: difference | difference.get("over_seeds", {}) for method, difference in found.items()}


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


def _confirmed(found: Findings) -> dict[str, dict[str, Any]]:
    """Return the difference of each method that was run again with fresh seeds."""
    if not found.confirmation:
        return {}
    runs = found.confirmation
    return _differences(compare_overall(found.study, runs) or compare(found.study, runs))


def _claim(
    method: str, difference: dict[str, Any], found: Findings, confirmed: dict[str, dict[str, Any]]
) -> Claim:
    verdict = _verdict(difference)
    if verdict not in ("better", "worse"):
        return Claim(method, verdict, ())
    blocks = []
    if _changes_sign(difference):
        blocks.append("it gains on some tasks and loses on others")
    if found.runs_left:
        blocks.append(f"{counted(found.runs_left, 'run')} to go")
    seeds = len({run.seed for run in found.runs if run.method == method})
    if seeds < FEWEST_SEEDS:
        blocks.append(f"{seeds} seeds, {FEWEST_SEEDS} are needed")
    tune = found.study.tune
    untuned = (
        []
        if tune is None or not tune.methods
        else [name for name in (method, found.study.baseline) if name not in tune.methods]
    )
    if tune is None:
        blocks.append("nothing was tuned")
    elif untuned:
        blocks.append(f"not tuned: {', '.join(untuned)}")
    elif not found.choices:
        blocks.append("what tuning tried was not kept")
    for choice in found.choices:
        if choice.method in (method, found.study.baseline) and choice.at_edge:
            on = f" on {choice.task}" if choice.task else ""
            blocks.append(
                f"the best {' and '.join(choice.at_edge)} of {choice.method}{on} is at the edge of its grid"
            )
    if verdict == "better":
        blocks += _fresh(confirmed.get(method))
    return Claim(method, verdict, tuple(blocks))


def _fresh(again: dict[str, Any] | None) -> list[str]:
    if again is None:
        return ["not run again with fresh seeds"]
    if _verdict(again) == "better":
        return []
    return [f"fresh seeds do not show it: {again['mean']:+.3f}, p {again['holm_p']:.3f}"]
