"""Draw how SmolLM2-135M learned on a GPU, from the report of tests/gpu.sh's part real-model.

"$(bash tools/bootstrap.sh)" tools/draw_real_model.py --report gpu.json --save docs/real_model.png
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.report.plots import STYLE
from megatron_ibpo.report.run_dir import atomic_path

NAMES = {"ibpo": "IBPO", "gspo": "GSPO"}


@dataclass
class Arguments:
    report: Path
    """What tests/gpu.sh saved, with the part real-model."""
    save: Path
    """PNG file to write."""


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture: reward of each step, and accuracy on held-out problems, of both methods.

    Raises:
        ValueError: the report has no such runs, or they are not of the real model.
    """
    part = report["parts"].get("real-model", {})
    if part.get("model") != "SmolLM2-135M-Instruct" or not part.get("methods"):
        reason = part.get("reason", "the part real-model was not run, or ran with a stand-in")
        raise ValueError(f"there is nothing to draw: {reason}")
    device = report["parts"].get("machine", {}).get("gpu", report["device"])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.1), dpi=120, layout="constrained")
        figure.suptitle(f"SmolLM2-135M on sums of three numbers, sampled by vLLM ({device})")
        rewards, accuracies = figure.subplots(1, 2)
        rewards.set_title("Reward in training")
        accuracies.set_title("Accuracy on held-out problems (95 % interval)")
        for method, run in part["methods"].items():
            rewards.plot(range(1, len(run["reward"]) + 1), run["reward"], label=NAMES.get(method, method))
            _draw_accuracy(accuracies, run["held_out"], NAMES.get(method, method))
        for axes in (rewards, accuracies):
            axes.set_xlabel("steps")
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)
        with atomic_path(path) as unfinished:
            figure.savefig(unfinished, format="png")


def _draw_accuracy(axes: Axes, rows: list[Mapping[str, Any]], name: str) -> None:
    steps, *lines = (
        [row[key] for row in rows] for key in ("step", "accuracy", "accuracy_low", "accuracy_high")
    )
    (line,) = axes.plot(steps, lines[0], marker="o", label=name)
    axes.fill_between(steps, lines[1], lines[2], alpha=0.2, color=line.get_color())


def main(arguments: Arguments) -> None:
    draw(json.loads(arguments.report.read_text()), arguments.save)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
