"""The credit audit in one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ibpo.study.credit_audit import AuditedResponse


def plot_audit(
    responses: Sequence[AuditedResponse], found: dict[str, Any], path: Path, *, title: str
) -> None:
    """Plot the value along wrong responses, the places of its largest drops, and the agreement of credit with
    them."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(13, 3.8), dpi=120, layout="constrained")
        figure.suptitle(title)
        values, drops, agreement = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
        _draw_values(values, responses)
        _draw_drops(drops, responses, found["min_drop"])
        _draw_agreement(agreement, found)
        figure.savefig(path)


def _draw_values(axes: Axes, responses: Sequence[AuditedResponse]) -> None:
    grid = np.linspace(0, 1, 50)
    curves = []
    for response in responses:
        at = np.asarray(response.boundaries) / response.boundaries[-1]
        curves.append(np.interp(grid, at, response.values))
        axes.plot(at, response.values, color="grey", alpha=0.15, linewidth=0.8)
    axes.plot(grid, np.mean(curves, axis=0), label="mean")
    axes.set_title("Value of prefixes of wrong responses")
    axes.set_xlabel("share of the response")
    axes.set_ylabel("rollouts that end correct")
    axes.legend(frameon=False)


def _draw_drops(axes: Axes, responses: Sequence[AuditedResponse], min_drop: float) -> None:
    ends = [
        response.boundaries[int(response.drops.argmax()) + 1] / response.boundaries[-1]
        for response in responses
        if response.drops.max() >= min_drop
    ]
    axes.hist(ends, bins=np.linspace(0, 1, 11).tolist())
    axes.set_title(f"Where the largest drop (≥ {min_drop:g}) ends")
    axes.set_xlabel("share of the response")


def _draw_agreement(axes: Axes, found: dict[str, Any]) -> None:
    bars = {name: measured["auc"] for name, measured in found["mask"].items()}
    bars["φ against nearness"] = found["phi"]["auc_of_phi_for_nearness_above_median"]
    shown = {name: bar for name, bar in bars.items() if bar is not None}
    for place, bar in enumerate(reversed(shown.values())):
        low, high = bar["estimate"] - bar["low"], bar["high"] - bar["estimate"]
        axes.errorbar(bar["estimate"], place, xerr=[[max(low, 0)], [max(high, 0)]], fmt="o", capsize=3)
    axes.set_yticks(range(len(shown)), list(reversed(shown)))
    axes.axvline(0.5, color="grey", linewidth=0.8)
    axes.set_xlim(0, 1)
    axes.set_title("Agreement with the drop, AUC and 95 % interval")
