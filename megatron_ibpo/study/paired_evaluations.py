"""Comparison of two evaluations, problem by problem."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy import stats

from megatron_ibpo.basics.text import counted, listed, shown
from megatron_ibpo.evaluate.accuracy import unknown_as_nan
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE, read_results
from megatron_ibpo.report.display import plain_table
from megatron_ibpo.study.statistics import Array, Estimate, estimate, shown_p


@dataclass(frozen=True)
class Compared:
    """One measure of one set in two evaluations."""

    set: str
    first: float
    second: float
    """Means over the problems that both have."""
    difference: Estimate
    """Second minus first; interval of Student's t over problems."""
    p: float
    """Two-sided p of no difference, by permutation: each problem's difference has either sign equally
    often. Unlike the t test's, it holds for few problems, whose differences may all be equal."""
    problems: int
    unpaired: int
    """Number of problems that only one of the two has, or has an outcome for."""
    settings: tuple[str, ...]
    """Sampling settings that differ between the two, apart from the policy."""


def compare_evaluations(first: Path, second: Path, measure: str) -> list[Compared]:
    """Compare every set that both directories have measured.

    Args:
        measure: a name in results.json: accuracy, greedy_accuracy, majority_accuracy, pass_at_8, …

    Raises:
        ValueError: a directory without results, no set that both have, a missing measure, a problem whose
            text
            differs between the two, or fewer than two problems in common.
    """
    results = [_measured(directory) for directory in (first, second)]
    common = [name for name in results[0] if name in results[1]]
    if not common:
        sets = [", ".join(measured) or "none" for measured in results]
        raise ValueError(f"no set is in both: {first} has {sets[0]}, {second} has {sets[1]}")
    return [_compared(name, results[0][name], results[1][name], measure) for name in common]


def comparison_table(compared: list[Compared]) -> Table:
    """Return a table with one line per set."""
    numbers = ("problems", "first", "second", "difference", "95 % interval", "p")
    table = plain_table(("set",), numbers)
    for comparison in compared:
        d = comparison.difference
        bounds = f"{d.low:+.3f} to {d.high:+.3f}"
        values = (f"{comparison.first:.3f}", f"{comparison.second:.3f}", f"{d.mean:+.3f}", bounds)
        table.add_row(comparison.set, f"{comparison.problems}", *values, shown_p(comparison.p))
    return table


def comparison_notes(compared: list[Compared]) -> list[str]:
    """Return notes that the reader needs with the table."""
    notes = []
    for comparison in compared:
        if comparison.unpaired:
            problems = counted(comparison.unpaired, "problem")
            notes.append(f"{comparison.set}: {problems} in only one of the two, left out")
        if comparison.settings:
            notes.append(f"{comparison.set}: sampled differently: {'; '.join(comparison.settings)}")
    return notes


def _measured(directory: Path) -> dict[str, dict[str, Any]]:
    results = read_results(directory)
    if not results:
        raise ValueError(f"{directory} holds no {RESULTS_FILE}: is it the directory of an evaluation?")
    measured = {name: entry for name, entry in results["sets"].items() if "problems" in entry}
    for name, entry in measured.items():
        if not _are_columns(entry["problems"]):
            raise ValueError(
                f"{directory / RESULTS_FILE}: the problems of {shown(name)} must be lists of one length, "
                "their ids and digests texts and all else numbers or null"
            )
    return measured


def _are_columns(problems: Any) -> bool:
    """Return whether `problems` has the form that `results_of_set` writes."""
    if not isinstance(problems, dict) or not {"id", "digest"} <= problems.keys():
        return False
    columns = problems.values()
    if not all(isinstance(column, list) and len(column) == len(problems["id"]) for column in columns):
        return False
    texts = [problems["id"], problems["digest"]]
    numbers = (value for name, column in problems.items() if name not in ("id", "digest") for value in column)
    return all(isinstance(text, str) for column in texts for text in column) and all(
        value is None or (isinstance(value, int | float) and abs(value) < 1e300) for value in numbers
    )


def _compared(name: str, first: dict[str, Any], second: dict[str, Any], measure: str) -> Compared:
    values = [_by_problem(name, entry, measure) for entry in (first, second)]
    shared = [problem for problem in values[0] if problem in values[1]]
    digests = [_by_problem(name, entry, "digest") for entry in (first, second)]
    if changed := [problem for problem in shared if digests[0][problem] != digests[1][problem]]:
        raise ValueError(f"{name}: these problems differ between the two: {listed(changed, most=5)}")
    pairs = np.array([unknown_as_nan([values[0][p], values[1][p]]) for p in shared]).reshape(-1, 2)
    scored = pairs[~np.isnan(pairs).any(axis=1)]
    if len(scored) < 2:
        raise ValueError(
            f"{name}: a comparison needs two problems that are in both, and there is {len(scored)}"
        )
    first_P, second_P = scored.T
    return Compared(
        set=name,
        first=float(first_P.mean()),
        second=float(second_P.mean()),
        difference=estimate(second_P - first_P),
        p=_permutation_p(first_P, second_P),
        problems=len(scored),
        unpaired=len({*values[0], *values[1]}) - len(scored),
        settings=tuple(_differences(first["settings"], second["settings"])),
    )


def _permutation_p(first_P: Array, second_P: Array) -> float:
    """Return the p, exact up to 16 problems, from 65,536 random signs beyond."""
    test = stats.permutation_test(
        (second_P, first_P),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**16,  # exact up to 16 problems
        batch=2**10,  # otherwise thousands of problems would take gigabytes
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def _by_problem(name: str, entry: dict[str, Any], measure: str) -> dict[str, Any]:
    problems = entry["problems"]
    if measure not in problems:
        measures = ", ".join(name for name in problems if name not in ("id", "digest"))
        raise ValueError(f"{name}: {measure!r} was not measured in both; in both are {measures}")
    return dict(zip(problems["id"], problems[measure], strict=True))


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [
        f"{name} {first.get(name)!r} and {second.get(name)!r}"
        for name in {**first, **second}
        if name not in ("policy", "prompts") and first.get(name) != second.get(name)
    ]
