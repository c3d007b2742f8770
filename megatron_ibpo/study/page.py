"""The result of a study on one page: page.html, which is self-contained; and its parts as files."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from megatron_ibpo.basics.text import counted
from megatron_ibpo.credit.metrics import ACCOMPANIED, ALONE, skill_needed
from megatron_ibpo.report.page.html import comparison, embedded, page
from megatron_ibpo.study.claims import Comparison
from megatron_ibpo.study.findings import Findings
from megatron_ibpo.study.plan import Study
from megatron_ibpo.study.run_results import RunResult
from megatron_ibpo.study.statistics import WINDOW_RESPONSES, in_words, response_windows
from megatron_ibpo.study.table import Table, markdown, tables


def write_page(
    findings: Findings, compared: Comparison, directory: Path, console: Console | None = None
) -> list[Path]:
    """Write page.html, table.md, curves.png and curves.svg. Return the files, results.json first if it
    exists.

    Args:
        console: shows the tables too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    all_tables = tables(findings, compared)
    written = markdown(findings, all_tables)
    (directory / "table.md").write_text(written, encoding="utf-8")
    figures = [("Curves", figure_of_runs(findings.study, findings.runs))]
    if points := compared.dose_response:
        figures.append(("Dose and response", dose_figure(findings.study, points)))
    if standing := break_even_points(findings.runs):
        figures.append(("Where corrections pay", break_even_figure(standing)))
    with mpl.rc_context({"svg.hashsalt": "study"}):  # the same study gives the same file
        figures[0][1].savefig(directory / "curves.png")
        drawn = [(title, _svg(figure)) for title, figure in figures]
    (directory / "curves.svg").write_bytes(drawn[0][1])
    (directory / "page.html").write_text(_page(findings, all_tables, drawn), encoding="utf-8")
    if console is not None:
        console.print(written, highlight=False, markup=False, soft_wrap=True)
    names = ("results.json", "page.html", "table.md", "curves.png", "curves.svg")
    return [directory / name for name in names if (directory / name).exists()]


def _svg(figure: Figure) -> bytes:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()


def _page(findings: Findings, all_tables: Sequence[Table], pictures: Sequence[tuple[str, bytes]]) -> str:
    """Return the page of runs with the study in place of runs."""
    study = findings.study
    size = (
        f"{counted(len(study.tasks), 'task')}, {counted(len(study.methods), 'method')}, "
        f"{counted(len(study.seeds), 'seed')}; "
        f"{study.budgets} per run; baseline {study.baseline}."
    )
    if findings.runs_left:
        size += f" {counted(findings.runs_left, 'run')} to go."
    power = in_words(findings.power) if findings.power is not None else "power: no pilot was run."
    drawn = [
        {"title": title, "picture": f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"}
        for title, svg in pictures
    ]
    sections = [asdict(table) for table in all_tables]
    overview = {
        "name": study.name,
        "lines": [size, power],
        "tasks": [f"{task.name}: {task.kind}" for task in study.tasks if task.name and task.kind],
        "sections": [*sections[:2], *drawn, *sections[2:]],
    }
    runs = {"version": "", "runs": [], "comparison": comparison([]), "study": overview}
    return page(study.name, f'{{"runs":{embedded(runs)}}}')


Points = list[tuple[float, float]]

_STYLE: Any = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


# ---------------------------------------------------------------------------------------------------- figures


def figure_of_runs(study: Study, results: Sequence[RunResult]) -> Figure:
    """Draw both curves of every task that has runs, one row per task."""
    panels: list[tuple[str, Callable[[RunResult], Points]]] = [
        ("Accuracy on held-out problems", lambda run: run.accuracy),
        (f"Reward in training, mean of {WINDOW_RESPONSES} responses", _smooth_rewards),
    ]
    tasks = [task.name for task in study.tasks if any(run.task == task.name for run in results)]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12.5, 0.6 + 3.6 * len(tasks)), dpi=120, layout="constrained")
        for row, task in enumerate(tasks):
            of_task = [run for run in results if run.task == task]
            for column, (title, points) in enumerate(panels, start=1):
                axes = figure.add_subplot(len(tasks), 2, 2 * row + column)
                _draw(axes, study, of_task, points)
                axes.set_title(f"{task}: {title}" if task else title)
                axes.set_xlabel(f"{study.unit_in_words}, evaluation not counted")
            axes.axhline(study.threshold, color="grey", linewidth=0.8, linestyle="--")
        lines, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(lines, names, frameon=False, loc="outside right center")
        figure.suptitle(f"{study.name}: mean over seeds, 95 % interval")
    return figure


def dose_figure(study: Study, points: Sequence[dict[str, Any]]) -> Figure:
    """Draw the difference from the baseline against the comparison skill of the warm start, by method."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for method in dict.fromkeys(point["method"] for point in points):
            of_method = [point for point in points if point["method"] == method]
            skill, mean, low, high = ([p[key] for p in of_method] for key in ("skill", "mean", "low", "high"))
            wings = [np.subtract(mean, low), np.subtract(high, mean)]
            axes.errorbar(skill, mean, yerr=wings, marker="o", capsize=3, label=method)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_xlabel("comparison skill of the warm start, measured")
        axes.set_ylabel(f"accuracy against {study.baseline}, 95 % interval")
        axes.legend(frameon=False)
    return figure


def _draw(
    axes: Axes, study: Study, results: Sequence[RunResult], points: Callable[[RunResult], Points]
) -> None:
    colors = mpl.color_sequences["tab10" if len(study.methods) <= 10 else "tab20"]
    # a method keeps its colour in panels that lack other methods
    for method, color in zip(study.methods, cycle(colors), strict=False):
        curves = [points(run) for run in results if run.method == method]
        curves = [curve for curve in curves if len(curve) > 1]
        if not curves:
            continue
        grid, mean, half = band(curves)
        axes.plot(grid, mean, label=method, color=color)
        axes.fill_between(grid, mean - half, mean + half, alpha=0.15, color=color, linewidth=0)


def band(curves: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (spent, mean, half width of the 95 % interval) on a common grid that all curves cover. The
    interval is Student's t over the curves; the width is 0 for a single curve."""
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    grid = np.linspace(start, end, 100)
    values = np.array([np.interp(grid, [s for s, _ in curve], [v for _, v in curve]) for curve in curves])
    if len(curves) == 1:
        return grid, values[0], np.zeros(len(grid))
    half = stats.t.ppf(0.975, len(curves) - 1) * stats.sem(values, axis=0)
    return grid, values.mean(axis=0), half


def _smooth_rewards(run: RunResult) -> Points:
    steps, means = response_windows([reward for _, reward in run.reward], run.step_responses)
    if not len(steps):
        return run.reward
    return [(run.reward[step][0], mean) for step, mean in zip(steps.tolist(), means.tolist(), strict=True)]


_TITLES = {
    ALONE: "No correct response in the group:\na first correct text is wanted",
    ACCOMPANIED: "A correct response in the group:\nanother one is wanted",
}


@dataclass(frozen=True)
class Point:
    """The corrections of one run in groups of one composition."""

    task: str
    method: str
    seed: int
    composition: str
    """`ALONE` or `ACCOMPANIED`."""
    resample: float
    """p, success rate of a further response."""
    skill: Mapping[str, float]
    """q, success rate of a correction: its estimate, with low and high of its 95 % interval."""
    price: float
    """κ, price of a correction in responses."""

    @property
    def margin(self) -> float:
        """Success rate of the corrections above what the law requires at their price."""
        return self.skill["estimate"] - skill_needed(
            self.resample, self.price, first=self.composition == ALONE
        )


def break_even_points(runs: Sequence[RunResult]) -> list[Point]:
    """Return the points of all runs that made corrections, up to two per run."""
    points = []
    for run, composition in product(runs, (ALONE, ACCOMPANIED)):
        standing = run.break_even or {}
        if rates := standing.get(composition):
            resample, skill, price = rates["resample"]["estimate"], rates["skill"], standing["price"]
            points.append(Point(run.task, run.method, run.seed, composition, resample, skill, price))
    return points


def break_even_figure(points: Sequence[Point]) -> Figure:
    """Draw the success of corrections over that of a further response, and the break-even curve at the median
    price of the points. Above the curve corrections pay, if the law's assumptions hold."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
        for axes, composition in zip(figure.subplots(1, 2), _TITLES, strict=True):
            _draw_law(axes, [point for point in points if point.composition == composition], composition)
        figure.axes[0].set_ylabel("success of a correction, 95 % interval")
    return figure


def _draw_law(axes: Axes, points: Sequence[Point], composition: str) -> None:
    names = dict.fromkeys((point.task, point.method) for point in points)
    for task, method in names:
        method_points = [point for point in points if (point.task, point.method) == (task, method)]
        resample = [point.resample for point in method_points]
        skill, low, high = (
            np.array([point.skill[key] for point in method_points]) for key in ("estimate", "low", "high")
        )
        wings = np.maximum([skill - low, high - skill], 0)
        label = f"{task}: {method}" if task else method
        axes.errorbar(resample, skill, yerr=wings, fmt="o", capsize=2, label=label)
    if points:
        price = median(point.price for point in points)
        grid = np.linspace(0, 1, 200)
        needed = [skill_needed(p, price, first=composition == ALONE) for p in grid]
        axes.plot(grid, needed, color="black", label=f"break-even at κ = {price:.1f}")
        axes.legend(frameon=False, fontsize=7)
    axes.set_title(_TITLES[composition])
    axes.set_xlabel("success of a further response")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
