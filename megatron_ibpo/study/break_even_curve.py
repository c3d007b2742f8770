"""The runs of a study on the curve of the break-even law (`credit.break_even`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ibpo.credit.break_even import ACCOMPANIED, ALONE, skill_needed
from megatron_ibpo.study.run_results import RunResult

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
    skill: float
    """q, success rate of a correction, with its 95 % interval."""
    skill_low: float
    skill_high: float
    price: float
    """κ, price of a correction in responses."""

    @property
    def margin(self) -> float:
        """Success rate of the corrections above what the law requires at their price."""
        return self.skill - skill_needed(self.resample, self.price, first=self.composition == ALONE)


def break_even_points(runs: Sequence[RunResult]) -> list[Point]:
    """Return the points of all runs that made corrections, up to two per run."""
    return [
        Point(
            run.task,
            run.method,
            run.seed,
            composition,
            standing["resample"]["estimate"],
            standing["skill"]["estimate"],
            standing["skill"]["low"],
            standing["skill"]["high"],
            run.break_even["price"],
        )
        for run in runs
        if run.break_even is not None
        for composition in (ALONE, ACCOMPANIED)
        if (standing := run.break_even.get(composition)) is not None
    ]


def break_even_figure(points: Sequence[Point]) -> Figure:
    """Draw the success of corrections over that of a further response, and the break-even curve at the median
    price of the points. Above the curve corrections pay, if the law's assumptions hold."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
        for axes, composition in zip(figure.subplots(1, 2), _TITLES, strict=True):
            _draw(axes, [point for point in points if point.composition == composition], composition)
        figure.axes[0].set_ylabel("success of a correction, 95 % interval")
    return figure


def _draw(axes: Axes, points: Sequence[Point], composition: str) -> None:
    names = dict.fromkeys((point.task, point.method) for point in points)
    for task, method in names:
        own = [point for point in points if (point.task, point.method) == (task, method)]
        skill = np.array([point.skill for point in own])
        wings = np.array([[p.skill - p.skill_low for p in own], [p.skill_high - p.skill for p in own]])
        label = f"{task}: {method}" if task else method
        axes.errorbar(
            [point.resample for point in own],
            skill,
            yerr=np.maximum(wings, 0),
            fmt="o",
            capsize=2,
            label=label,
        )
    if points:
        price = median(point.price for point in points)
        resample = np.linspace(0, 1, 200)
        needed = [skill_needed(p, price, first=composition == ALONE) for p in resample]
        axes.plot(resample, needed, color="black", label=f"break-even at κ = {price:.1f}")
        axes.legend(frameon=False, fontsize=7)
    axes.set_title(_TITLES[composition])
    axes.set_xlabel("success of a further response")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
