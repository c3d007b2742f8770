"""Fit the planner's coefficients to one half of the published runs and predict the other half; then fit them
to all, which is what the planner uses.

    python tools/fit_planner.py                 # fit, judge, print
    python tools/fit_planner.py --save          # and keep it, with the tables of docs/planner.md

The halves are whole sources, by the hash of their names (`published_runs.halves`). The first fit uses only
the fitted half. If a row's open facts move its prediction by more than half (`LOOSE`), the row is judged by
whether the measured figure is in the predicted range, separately from the errors.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import yaml
from predict_published import predict
from published_runs import ROOT, Row, halves, read_evidence, shape_of
from scipy.optimize import least_squares

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.plan.coefficients import FILE, NAMES, Coefficients

RESULTS = ROOT / "tools/results/fit_planner.json"
PAGE = ROOT / "docs/planner.md"
LOOSE = 1.5
"""Highest over lowest prediction within a row's open facts, above which the row is judged by its range."""
FACTORS = frozenset({"loop", "ampere", "blackwell", "cdna"})
SHARES = ("matmul", "experts", "attention", "memory", "link", "prefill", "update", "host")
"""Coefficients that do not exceed 1."""
PRIOR = 1.0
"""Standard deviation of a coefficient's logarithm before any row is seen: the fit starts from the defaults,
and a coefficient that no row affects stays there."""
PRIOR_FACTOR = 0.3
"""The same for `FACTORS`."""
NOISE = 0.2
"""Standard deviation of a figure's logarithm, in addition to its row's open facts."""
EVALUATIONS = 12

# ------------------------------------------------------------------------------------------------ the fit


def known(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose model this project knows."""
    return [row for row in rows if shape_of(row.facts["model"]) is not None]


def fit(rows: Sequence[Row], start: Coefficients) -> tuple[Coefficients, dict[str, tuple[float, float]]]:
    """Return the coefficients nearest to the rows, and 90 % intervals of those that the rows affect.

    Least squares of logarithms. A source weighs as the square root of its number of figures, a figure weighs
    less the more its row leaves open, and outliers count less (soft L1).
    """
    default = np.log([getattr(Coefficients(), name) for name in NAMES])
    prior = np.where([name in FACTORS for name in NAMES], PRIOR_FACTOR, PRIOR)
    upper = np.array([0.0 if name in SHARES else np.inf for name in NAMES])
    origin = np.minimum(np.log([getattr(start, name) for name in NAMES]), upper - 1e-4)
    weights = figure_weights(rows)

    def residuals(point: np.ndarray) -> np.ndarray:
        reached = from_logarithms(point)
        off = [
            weight[name] * math.log(value / row.measured[name])
            for row, weight in zip(rows, weights, strict=True)
            for name, value in predict(row.facts, row.kind, row.times, reached).items()
        ]
        return np.array([*off, *((point - default) / prior)])

    found = least_squares(
        residuals, origin, bounds=(-np.inf, upper), loss="soft_l1", diff_step=1e-3, max_nfev=EVALUATIONS
    )
    moved = np.abs(found.jac[: -len(NAMES)]).max(axis=0) > 1e-3
    spread = 1.645 * np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    intervals = {
        name: (math.exp(found.x[i] - spread[i]), math.exp(found.x[i] + spread[i]))
        for i, name in enumerate(NAMES)
        if moved[i]
    }
    return from_logarithms(found.x), intervals


def from_logarithms(point: np.ndarray) -> Coefficients:
    return Coefficients(**dict(zip(NAMES, map(float, np.exp(point)), strict=True)))


def figure_weights(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Return the weight of each row's figures: the inverse of their standard deviation, which is that of an
    even spread over the row's open facts together with `NOISE`, shared among the source's figures."""
    figures: dict[str, int] = defaultdict(int)
    for row in rows:
        figures[row.source] += len(row.times)
    top = statistics.mean(figures.values())
    return [
        {
            name: (top / figures[row.source]) ** 0.25
            / math.hypot(NOISE, math.log(high / low) / math.sqrt(12))
            for name, (low, high) in open_range(row, Coefficients()).items()
        }
        for row in rows
    ]


def open_range(row: Row, reached: Coefficients) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest prediction over the corners of the row's open facts."""
    corners = [dict(zip(row.left_open, corner, strict=True)) for corner in product(*row.left_open.values())]
    found = [
        predict(row.with_facts(**corner), row.kind, row.times, reached)
        for corner in corners
        if not (row.kind == "step" and corner.get("mean_length", 0) >= row.facts["longest"])
    ]
    return {name: (min(f[name] for f in found), max(f[name] for f in found)) for name in found[0]}


# --------------------------------------------------------------------------------------------- the errors


@dataclass(frozen=True)
class Judged:
    """A figure and its prediction."""

    source: str
    row: str
    half: str
    kind: str
    hardware: str
    figure: str
    measured: float
    predicted: float
    low: float
    high: float
    cited: str

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def loose(self) -> bool:
        """True if the row's open facts decide the prediction."""
        return self.high / self.low > LOOSE


def judge(rows: Sequence[Row], reached: Coefficients, half: Mapping[str, str]) -> list[Judged]:
    """Return all figures with their predictions."""
    judged = []
    for row in rows:
        ranges = open_range(row, reached)
        for name, value in predict(row.facts, row.kind, row.times, reached).items():
            low, high = min(ranges[name][0], value), max(ranges[name][1], value)
            judged.append(
                Judged(
                    row.source, row.name, half[row.source], row.kind, row.facts["hardware"], name,
                    row.measured[name], value, low, high, row.cited,
                )
            )  # fmt: skip
    return judged


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return median, 90th percentile and factor of the absolute error of firm rows, and the number of loose
    rows whose figure is within the predicted range."""
    firm = [found.error for found in judged if not found.loose]
    loose = [found.low <= found.measured <= found.high for found in judged if found.loose]
    errors = np.abs(firm)
    return {
        "figures": len(firm),
        "median": round(float(np.median(errors)), 4) if firm else None,
        "p90": round(float(np.quantile(errors, 0.9)), 4) if firm else None,
        "factor": round(float(np.exp(np.quantile(np.abs(np.log1p(firm)), 0.9))), 3) if firm else None,
        "bias": round(float(np.median(firm)), 4) if firm else None,
        "loose": len(loose),
        "loose_within": sum(loose),
    }


def grouped(judged: Sequence[Judged], key: Callable[[Judged], str]) -> dict[str, Any]:
    """Return the summary of each group."""
    names = sorted({key(found) for found in judged})
    return {name: summary([found for found in judged if key(found) == name]) for name in names}


# ------------------------------------------------------------------------------------------------ layouts


@dataclass(frozen=True)
class Ordered:
    """Published layouts of the same training on the same GPUs, and whether the planner orders them right."""

    group: str
    layouts: int
    fastest: bool
    """True if the published fastest layout is predicted to be fastest."""
    pairs: int
    right: int
    """Number of pairs in the published order."""


def orderings(judged: Sequence[Judged], rows: Sequence[Row]) -> list[Ordered]:
    """Return one entry for each set of training rows that differ in layout alone."""
    facts = {(row.source, row.name): row.facts for row in rows}
    same: dict[tuple[Any, ...], dict[tuple[Any, ...], Judged]] = defaultdict(dict)
    for found in judged:
        fact = facts[found.source, found.row]
        if found.kind == "training":
            group = tuple(fact.get(name) for name in ("model", "hardware", "gpus", "precision", "sequence"))
            layout = tuple(
                fact.get(name) or 1
                for name in (
                    "tensor",
                    "pipeline",
                    "context",
                    "expert",
                    "chunks",
                    "micro_batch",
                    "recompute",
                    "fsdp",
                )
            )
            same[found.source, *group].setdefault(layout, found)
    return [_ordered(group, list(alike.values())) for group, alike in same.items() if len(alike) > 1]


def _ordered(group: tuple[Any, ...], alike: Sequence[Judged]) -> Ordered:
    def speed(value: float, found: Judged) -> float:
        return -value if found.figure.endswith("_seconds") else value

    points = [(speed(found.measured, found), speed(found.predicted, found)) for found in alike]
    pairs = [(a, b) for i, a in enumerate(points) for b in points[:i] if a[0] != b[0]]
    return Ordered(
        group=" ".join(map(str, group)),
        layouts=len(alike),
        fastest=max(points)[1] == max(predicted for _, predicted in points),
        pairs=len(pairs),
        right=sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs),
    )


# ------------------------------------------------------------------------------------------------ the page


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the text after each marker of the page."""

    def line(name: str, found: Mapping[str, Any]) -> str:
        shares = ["–" if found[key] is None else f"{100 * found[key]:.0f} %" for key in ("median", "p90")]
        within = f"{found['loose_within']} of {found['loose']}" if found["loose"] else "–"
        return f"| {name} | {found['figures']} | {shares[0]} | {shares[1]} | {within} |"

    def table(what: str, found: Mapping[str, Any]) -> str:
        head = f"| {what} | figures | median error | 90th percentile | loose rows within range |"
        return "\n".join([head, "|---|---|---|---|---|", *(line(*entry) for entry in found.items())])

    return {
        "halves": table("half, kind", results["halves"]),
        "gpus": table("held out, kind and GPU", results["gpus"]),
    }


def write_page(results: Mapping[str, Any]) -> None:
    """Rewrite the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(results).items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- end of {name} -->")
        assert closing, f"the page has no table {name}"
        text = before + opening + table + "\n" + closing + after
    PAGE.write_text(text, encoding="utf-8")


def save(used: Coefficients, error: Mapping[str, float]) -> None:
    """Write the file that the planner reads."""
    head = "# Made by tools/fit_planner.py --save; megatron_ibpo/plan/coefficients.py says what each is.\n"
    coefficients = {name: float(f"{value:.4g}") for name, value in asdict(used).items()}
    raw = {"coefficients": coefficients, "error": dict(error)}
    FILE.write_text(head + yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")


@dataclass
class Arguments:
    save: bool = False
    """Save the results: coefficients.yaml, tools/results/fit_planner.json, tables of docs/planner.md."""


def main(arguments: Arguments) -> None:
    everything = read_evidence()
    rows, half = known(everything), halves(everything)
    fitted, _ = fit([row for row in rows if half[row.source] == "fitted"], Coefficients())
    judged = judge(rows, fitted, half)
    used, intervals = fit(rows, fitted)
    unseen = [found for found in judged if found.half == "held out"]
    layouts = orderings(judged, rows)
    results = {
        "machine": machine("numpy", "scipy"),
        "rows_in_all": len(everything),
        "half": half,
        "coefficients": {
            name: {
                "used": getattr(used, name),
                "fitted_half": getattr(fitted, name),
                "start": getattr(Coefficients(), name),
            }
            | dict(zip(("low", "high"), intervals.get(name, ()), strict=False))
            for name in NAMES
        },
        "halves": grouped(judged, lambda found: f"{found.half}, {found.kind}"),
        "gpus": grouped(unseen, lambda found: f"{found.kind}, {found.hardware}"),
        "used": grouped(judge(rows, used, half), lambda found: found.kind),
        "sources": grouped(judged, lambda found: found.source),
        "layouts": [asdict(found) for found in layouts],
        "rows": [asdict(found) | {"error": round(found.error, 4), "loose": found.loose} for found in judged],
    }
    error = {
        kind: found["factor"]
        for kind, found in grouped(unseen, lambda found: found.kind).items()
        if kind in ("training", "generation", "step")
    }
    for name in ("coefficients", "halves", "gpus", "used", "sources", "layouts"):
        print(name, json.dumps(results[name], indent=1), flush=True)
    right = sum(found.fastest for found in layouts)
    print(f"the fastest layout is right in {right} of {len(layouts)}")
    if arguments.save:
        save(used, error)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        write_page(results)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
