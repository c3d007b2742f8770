"""Output of a stand-alone evaluation: what it prints and saves, evaluation.png included."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from megatron_ibpo.evaluate import SetEvaluation
from megatron_ibpo.evaluate.sets import finish_results
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE, samples_path
from megatron_ibpo.report.display import open_console, plain_table
from megatron_ibpo.report.run_curves import STYLE
from megatron_ibpo.report.run_dir import atomic_path
from megatron_ibpo.report.run_report import measure_name
from megatron_ibpo.report.summary import measures

PLOT_FILE = "evaluation.png"


def report_evaluation(
    run_dir: Path,
    policy: str,
    evaluated: Sequence[SetEvaluation],
    *,
    seconds: Mapping[str, float],
    counts: Mapping[str, int],
) -> None:
    """Finish results.json, draw evaluation.png, and show the measures.

    Args:
        policy: the evaluated policy.
        seconds: seconds of this process by stage.
        counts: numbers of deaths.
    """
    console = open_console()
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    content = finish_results(run_dir, evaluated, {"seconds_by_stage": rounded, "counts": dict(counts)})
    plot_evaluation(content["sets"], run_dir / PLOT_FILE, title=Path(policy).name)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for set_evaluation in evaluated:
        say(f"{set_evaluation.set.name}: {set_evaluation.evaluation}")
    console.print(_table(content["sets"], [set_evaluation.set.name for set_evaluation in evaluated]))
    files = [
        RESULTS_FILE,
        *(samples_path(run_dir, set_evaluation.set.name).name for set_evaluation in evaluated),
        PLOT_FILE,
    ]
    for file in files:
        say(str(run_dir / file))


def _table(sets: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Return a table with a line per measure of each set."""
    table = plain_table(("set", ""), ("share", "95 % interval"))
    for name in names:
        entry = sets[name]
        for measure, metric in measures(entry["measures"]).items():
            low, high = entry["intervals"][metric]
            row = (measure_name(measure), f"{entry['measures'][metric]:.3f}", f"{low:.3f} to {high:.3f}")
            table.add_row(name, *row)
        for metric, words in (("truncated_share", "cut off"), ("no_answer_share", "without an answer")):
            if metric in entry["measures"]:
                table.add_row(name, words, f"{entry['measures'][metric]:.3f}", "")
        table.add_section()
    return table


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
