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
from megatron_ibpo.plan.workload import COEFFICIENT_NAMES, COEFFICIENTS_FILE, Coefficients

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


def rows_of_known_models(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose model this project knows."""
    return [row for row in rows if shape_of(row.facts["model"]) is not None]


def fit(rows: Sequence[Row], start: Coefficients) -> tuple[Coefficients, dict[str, tuple[float, float]]]:
    """Return the coefficients nearest to the rows, and 90 % intervals of those that the rows affect.

    Least squares of logarithms. A source weighs as the square root of its number of figures, a figure weighs
    less the more its row leaves open, and outliers count less (soft L1).
    """
    default = np.log([getattr(Coefficients(), name) for name in COEFFICIENT_NAMES])
    prior = np.where([name in FACTORS for name in COEFFICIENT_NAMES], PRIOR_FACTOR, PRIOR)
    upper = np.array([0.0 if name in SHARES else np.inf for name in COEFFICIENT_NAMES])
    origin = np.minimum(np.log([getattr(start, name) for name in COEFFICIENT_NAMES]), upper - 1e-4)
    weights = figure_weights(rows)

    def residuals(point: np.ndarray) -> np.ndarray:
        reached = from_logarithms(point)
        off = [
            weight[name] * math.log(value / row.measured[name])
            for row, weight in zip(rows, weights, strict=True)
            for name, value in predict(row.facts, row.kind, row.times, reached).items()
        ]
        return np.array([*off, *((point - default) / prior)])

    solution = least_squares(
        residuals, origin, bounds=(-np.inf, upper), loss="soft_l1", diff_step=1e-3, max_nfev=EVALUATIONS
    )
    moved = np.abs(solution.jac[: -len(COEFFICIENT_NAMES)]).max(axis=0) > 1e-3
    spread = 1.645 * np.sqrt(np.diag(np.linalg.inv(solution.jac.T @ solution.jac)))
    intervals = {
        name: (math.exp(solution.x[i] - spread[i]), math.exp(solution.x[i] + spread[i]))
        for i, name in enumerate(COEFFICIENT_NAMES)
        if moved[i]
    }
    return from_logarithms(solution.x), intervals


def from_logarithms(point: np.ndarray) -> Coefficients:
    return Coefficients(**dict(zip(COEFFICIENT_NAMES, map(float, np.exp(point)), strict=True)))


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
    predictions = [
        predict(row.with_facts(**corner), row.kind, row.times, reached)
        for corner in corners
        if not (row.kind == "step" and corner.get("mean_length", 0) >= row.facts["longest"])
    ]
    return {
        name: (min(f[name] for f in predictions), max(f[name] for f in predictions))
        for name in predictions[0]
    }


# --------------------------------------------------------------------------------------------- the errors


@dataclass(frozen=True)
class PredictedFigure:
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


def judge(rows: Sequence[Row], reached: Coefficients, half: Mapping[str, str]) -> list[PredictedFigure]:
    """Return all figures with their predictions."""
    figures = []
    for row in rows:
        ranges = open_range(row, reached)
        for name, value in predict(row.facts, row.kind, row.times, reached).items():
            low, high = min(ranges[name][0], value), max(ranges[name][1], value)
            figures.append(
                PredictedFigure(
                    row.source, row.name, half[row.source], row.kind, row.facts["hardware"], name,
                    row.measured[name], value, low, high, row.cited,
                )
            )  # fmt: skip
    return figures


def summary(figures: Sequence[PredictedFigure]) -> dict[str, Any]:
    """Return median, 90th percentile and factor of the absolute error of firm rows, and the number of loose
    rows whose figure is within the predicted range."""
    firm = [figure.error for figure in figures if not figure.loose]
    loose = [figure.low <= figure.measured <= figure.high for figure in figures if figure.loose]
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


def grouped(figures: Sequence[PredictedFigure], key: Callable[[PredictedFigure], str]) -> dict[str, Any]:
    """Return the summary of each group."""
    names = sorted({key(figure) for figure in figures})
    return {name: summary([figure for figure in figures if key(figure) == name]) for name in names}


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


def orderings(figures: Sequence[PredictedFigure], rows: Sequence[Row]) -> list[Ordered]:
    """Return one entry for each set of training rows that differ in layout alone."""
    facts = {(row.source, row.name): row.facts for row in rows}
    by_layout: dict[tuple[Any, ...], dict[tuple[Any, ...], PredictedFigure]] = defaultdict(dict)
    for figure in figures:
        fact = facts[figure.source, figure.row]
        if figure.kind == "training":
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
            by_layout[figure.source, *group].setdefault(layout, figure)
    return [_ordered(group, list(alike.values())) for group, alike in by_layout.items() if len(alike) > 1]


def _ordered(group: tuple[Any, ...], alike: Sequence[PredictedFigure]) -> Ordered:
    def speed(value: float, figure: PredictedFigure) -> float:
        return -value if figure.figure.endswith("_seconds") else value

    points = [(speed(figure.measured, figure), speed(figure.predicted, figure)) for figure in alike]
    pairs = [(a, b) for i, a in enumerate(points) for b in points[:i] if a[0] != b[0]]
    return Ordered(
        group=" ".join(map(str, group)),
        layouts=len(alike),
        fastest=max(points)[1] == max(predicted for _, predicted in points),
        pairs=len(pairs),
        right=sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs),
    )


# ------------------------------------------------------------------------------------------------ the page


HELD_OUT = "held out, "
"""Beginning of the names of the half that was not fitted."""


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the text after each marker of the page."""

    def line(name: str, entry: Mapping[str, Any]) -> str:
        shares = ["–" if entry[key] is None else f"{100 * entry[key]:.0f} %" for key in ("median", "p90")]
        within = f"{entry['loose_within']} of {entry['loose']}" if entry["loose"] else "–"
        return f"| {name} | {entry['figures']} | {shares[0]} | {shares[1]} | {within} |"

    def table(title: str, summaries: Mapping[str, Any]) -> str:
        head = f"| {title} | figures | median error | 90th percentile | loose rows within range |"
        return "\n".join([head, "|---|---|---|---|---|", *(line(*entry) for entry in summaries.items())])

    unseen = {
        name.removeprefix(HELD_OUT): entry
        for name, entry in results["halves"].items()
        if name.startswith(HELD_OUT)
    }
    return {
        "halves": table("held out, kind", unseen),
        "gpus": table("held out, kind and GPU", results["gpus"]),
    }


def write_page(results: Mapping[str, Any]) -> None:
    """Rewrite the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(results).items():
        head, opening, body = text.partition(f"<!-- {name} -->\n")
        _, closing, tail = body.partition(f"<!-- end of {name} -->")
        assert closing, f"the page has no table {name}"
        text = head + opening + table + "\n" + closing + tail
    PAGE.write_text(text, encoding="utf-8")


def save(used: Coefficients, error: Mapping[str, float]) -> None:
    """Write the file that the planner reads."""
    head = "# Made by tools/fit_planner.py --save; megatron_ibpo/plan/workload.py says what each is.\n"
    coefficients = {name: float(f"{value:.4g}") for name, value in asdict(used).items()}
    raw = {"coefficients": coefficients, "error": dict(error)}
    COEFFICIENTS_FILE.write_text(head + yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")


@dataclass
class Arguments:
    save: bool = False
    """Save the results: coefficients.yaml, tools/results/fit_planner.json, tables of docs/planner.md."""


def main(arguments: Arguments) -> None:
    everything = read_evidence()
    rows, half = rows_of_known_models(everything), halves(everything)
    fitted, _ = fit([row for row in rows if half[row.source] == "fitted"], Coefficients())
    figures = judge(rows, fitted, half)
    used, intervals = fit(rows, fitted)
    unseen = [figure for figure in figures if figure.half == "held out"]
    layouts = orderings(figures, rows)
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
            for name in COEFFICIENT_NAMES
        },
        "halves": grouped(figures, lambda figure: f"{figure.half}, {figure.kind}"),
        "gpus": grouped(unseen, lambda figure: f"{figure.kind}, {figure.hardware}"),
        "used": grouped(judge(rows, used, half), lambda figure: figure.kind),
        "sources": grouped(figures, lambda figure: figure.source),
        "layouts": [asdict(figure) for figure in layouts],
        "rows": [
            asdict(figure) | {"error": round(figure.error, 4), "loose": figure.loose} for figure in figures
        ],
    }
    error = {
        kind: figure["factor"]
        for kind, figure in grouped(unseen, lambda figure: figure.kind).items()
        if kind in ("training", "generation", "step")
    }
    for name in ("coefficients", "halves", "gpus", "used", "sources", "layouts"):
        print(name, json.dumps(results[name], indent=1), flush=True)
    right = sum(figure.fastest for figure in layouts)
    print(f"the fastest layout is right in {right} of {len(layouts)}")
    if arguments.save:
        save(used, error)
        # most of it is thousands of numbers that nobody reads
        RESULTS.write_text(json.dumps(results, separators=(",", ":")) + "\n", encoding="utf-8")
        write_page(results)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
