"""The course of a run in one picture, curves.png, and the measures of an evaluation, evaluation.png."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_ibpo.report.run_dir import atomic_path
from megatron_ibpo.report.summary import HELD_OUT_LOSS

_LINES = {
    "Reward in training": ["reward", "shaped_reward"],
    "Turns and tool calls per episode": ["reward/turns", "reward/tool_calls"],
    "Corrections": ["correction_success", "rewrite_rate"],
    "Clip fraction": ["clip_fraction"],
    "Trainer against engine, mean |Δ log-prob| per token": ["logprob_diff_abs_mean"],
    "Gradient norm": ["grad_norm"],
}
"""Panel title → metrics drawn in it, if they exist."""
STYLE: Any = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def plot_curves(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> bool:
    """Plot the rows of a metrics log, without panels that lack data; return whether any was drawn."""
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    panels: list[tuple[str, Callable[[Axes], None]]] = []
    if any(HELD_OUT_LOSS in row for row in evaluations) or any("loss_tokens" in row for row in steps):
        panels.append(("Loss per token", partial(_draw_losses, steps=steps, evaluations=evaluations)))
    elif evaluations:
        panels.append(("Accuracy on held-out problems", partial(_draw_evaluations, evaluations=evaluations)))
    for name, metrics in _LINES.items():
        present = [metric for metric in metrics if any(row.get(metric) is not None for row in steps)]
        if present:
            panels.append((name, partial(_draw_lines, steps=steps, metrics=present)))
    if any(row.get("seconds") for row in steps):
        panels.append(("Seconds per step, by stage", partial(_draw_seconds, steps=steps)))
    if not panels:
        return False

    lines = 1 if len(panels) <= 3 else 2
    columns = -(-len(panels) // lines)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * columns, 3.1 * lines), dpi=120, layout="constrained")
        figure.suptitle(title)
        for position, (name, draw) in enumerate(panels, start=1):
            axes = figure.add_subplot(lines, columns, position)
            axes.set_title(name)
            axes.set_xlabel("steps")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            draw(axes)
        with atomic_path(path) as unfinished:
            figure.savefig(unfinished, format="png")
    return True


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_lines(axes: Axes, steps: Sequence[dict[str, Any]], metrics: Sequence[str]) -> None:
    for metric in metrics:
        x, y = _series(steps, metric)
        label = metric.removeprefix("reward/").replace("_", " ")
        axes.plot(x, y, marker="." if len(x) < 40 else None, label=label)
    axes.set_ylim(bottom=0 if axes.get_ylim()[0] > 0 else None)
    if len(metrics) > 1:
        axes.legend(frameon=False)


def _draw_losses(axes: Axes, steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    axes.plot(*_series(steps, "loss"), label="training")
    axes.plot(*_series(evaluations, HELD_OUT_LOSS), marker="o", label="held out")
    axes.legend(frameon=False)


def _draw_evaluations(axes: Axes, evaluations: Sequence[dict[str, Any]]) -> None:
    lines = [("accuracy", "sampled (95 % interval)", "o"), ("greedy_accuracy", "greedy", "s")]
    metrics = dict.fromkeys(name for row in evaluations for name in row)
    of_sets = [name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy")]
    lines += [(name, name.split("/")[1], "o") for name in of_sets]
    for name, label, marker in lines:
        x, y = _series(evaluations, name)
        if not x:
            continue
        (line,) = axes.plot(x, y, marker=marker, label=label)
        _, low = _series(evaluations, f"{name}_low")
        _, high = _series(evaluations, f"{name}_high")
        if low and len(low) == len(high) == len(x):
            axes.fill_between(x, low, high, alpha=0.2, color=line.get_color())
    axes.legend(frameon=False, loc="lower right")


def _draw_seconds(axes: Axes, steps: Sequence[dict[str, Any]]) -> None:
    stages = list(dict.fromkeys(stage for row in steps for stage in row["seconds"]))
    x = [row["step"] for row in steps]
    below = [0.0] * len(x)
    for stage in stages:
        heights = [row["seconds"].get(stage, 0.0) for row in steps]
        axes.bar(x, heights, bottom=below, width=1.0, label=stage)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper left")


_MEASURE_LABELS = {
    "accuracy": "sampled",
    "greedy_accuracy": "greedy",
    "majority_accuracy": "maj@n",
    "best_of_accuracy": "best of n",
    "corrected_accuracy": "corrected",
}


def plot_evaluation(sets: Mapping[str, Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw the sets of results.json that have measures.

    Args:
        sets: entries of results.json by name.
    """
    done = {name: entry for name, entry in sets.items() if "measures" in entry}
    curves = {name: points for name, entry in done.items() if len(points := _pass_at(entry)) > 1}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2 if curves else 4.6, 3.4), dpi=120, layout="constrained")
        figure.suptitle(title)
        _draw_measures(figure.add_subplot(1, 2 if curves else 1, 1), done)
        if curves:
            _draw_pass_at(figure.add_subplot(1, 2, 2), curves)
        with atomic_path(path) as unfinished:
            figure.savefig(unfinished, format="png")


def _draw_measures(axes: Axes, sets: Mapping[str, Mapping[str, Any]]) -> None:
    axes.set_title("Accuracy, 95 % intervals")
    names = list(sets)
    for place, (measure, label) in enumerate(_MEASURE_LABELS.items()):
        having = [number for number, name in enumerate(names) if measure in sets[name]["measures"]]
        if not having:
            continue
        values = [sets[names[number]]["measures"][measure] for number in having]
        bounds = [sets[names[number]]["intervals"][measure] for number in having]
        below = [max(0.0, value - low) for value, (low, _) in zip(values, bounds, strict=True)]
        above = [max(0.0, high - value) for value, (_, high) in zip(values, bounds, strict=True)]
        x = [number + 0.14 * (place - 2) for number in having]
        axes.errorbar(x, values, yerr=[below, above], fmt="o", capsize=3, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.25)  # room for the legend
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")


def _draw_pass_at(axes: Axes, curves: Mapping[str, list[tuple[int, float, float, float]]]) -> None:
    axes.set_title("pass@k")
    axes.set_xlabel("k")
    axes.set_xscale("log", base=2)
    for name, points in curves.items():
        ks, values, lows, highs = zip(*points, strict=True)
        (line,) = axes.plot(ks, values, marker="o", label=name)
        axes.fill_between(ks, lows, highs, alpha=0.2, color=line.get_color())
    ticks = sorted({k for points in curves.values() for k, *_ in points})
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, loc="lower right")


def _pass_at(entry: Mapping[str, Any]) -> list[tuple[int, float, float, float]]:
    """Return (k, pass@k, low, high); pass@1 is the accuracy."""
    names = {1: "accuracy"}
    for name in entry["measures"]:
        if name.startswith("pass_at_"):
            names[int(name.removeprefix("pass_at_"))] = name
    return [(k, entry["measures"][name], *entry["intervals"][name]) for k, name in sorted(names.items())]
