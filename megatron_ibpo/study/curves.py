"""Accuracy and reward over what was spent, one line per method with its band over seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from megatron_ibpo.study.plan import Study
from megatron_ibpo.study.results import RunResult
from megatron_ibpo.study.statistics import running_mean

Points = list[tuple[float, float]]

_REWARD_WINDOW = 5


def plot_comparison(study: Study, results: Sequence[RunResult], paths: Sequence[Path]) -> None:
    """Draw both curves into each of `paths`; the suffix says the format."""
    panels: list[tuple[str, Callable[[RunResult], Points]]] = [
        ("Accuracy on held-out problems", lambda run: run.accuracy),
        (f"Reward in training, mean of {_REWARD_WINDOW} steps", lambda run: _smooth(run.reward)),
    ]
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "study"}):
        figure = Figure(figsize=(12.5, 4.2), dpi=120, layout="constrained")
        for position, (title, points) in enumerate(panels, start=1):
            axes = figure.add_subplot(1, 2, position)
            _draw(axes, study, results, points)
            axes.set_title(title)
            axes.set_xlabel(f"{study.budget_unit.replace('-', ' ')}, evaluation not counted")
        figure.axes[1].axhline(study.threshold, color="grey", linewidth=0.8, linestyle="--")
        lines, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(lines, names, frameon=False, loc="outside right center")
        figure.suptitle(f"{study.name}: mean over seeds, 95 % interval")
        for path in paths:
            figure.savefig(path)


def _draw(
    axes: Axes, study: Study, results: Sequence[RunResult], points: Callable[[RunResult], Points]
) -> None:
    for method in study.methods:
        curves = [points(run) for run in results if run.method == method]
        curves = [curve for curve in curves if len(curve) > 1]
        if not curves:
            continue
        grid, mean, half = band(curves)
        (line,) = axes.plot(grid, mean, label=method)
        axes.fill_between(grid, mean - half, mean + half, alpha=0.15, color=line.get_color(), linewidth=0)


def band(curves: Sequence[Points], points: int = 100) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(spent, mean, half width of the 95 % interval) on a common grid that all curves cover; Student's t over
    the curves, 0 wide for a single one."""
    start = max(curve[0][0] for curve in curves)
    end = min(curve[-1][0] for curve in curves)
    grid = np.linspace(start, end, points)
    values = np.array([np.interp(grid, [s for s, _ in curve], [v for _, v in curve]) for curve in curves])
    if len(curves) == 1:
        return grid, values[0], np.zeros(points)
    half = stats.t.ppf(0.975, len(curves) - 1) * stats.sem(values, axis=0)
    return grid, values.mean(axis=0), half


def _smooth(curve: Points) -> Points:
    if len(curve) < _REWARD_WINDOW:
        return curve
    means = running_mean([value for _, value in curve], _REWARD_WINDOW).tolist()
    return [(spent, mean) for (spent, _), mean in zip(curve[_REWARD_WINDOW - 1 :], means, strict=True)]
