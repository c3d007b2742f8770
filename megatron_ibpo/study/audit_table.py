"""The findings of a credit audit: text and a table for the terminal, and a figure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from megatron_ibpo.study.credit_audit import AuditedResponse

_MEASURES = {
    "auc": "AUC",
    "rank_correlation": "rank correlation",
    "first_credited_step_is_the_error": "first credited step is the error",
}
_CREDITS = {"mask": "tokens that corrections change (the mask)"}
_DASH = "–"


def audit_page(counts: Mapping[str, int], findings: Mapping[str, Any]) -> Group:
    """Return the findings of `credit_audit.audit` for a console, with 95 % intervals in brackets.

    Args:
        counts: numbers of what was sampled for them.
    """
    return Group(*_sampled(counts, findings), "", _agreement(findings), "", *_verdicts(findings))


def _sampled(counts: Mapping[str, int], findings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{counts['responses_sampled']:,} responses were sampled; {counts['wrong']:,} are wrong. "
        f"{counts['corrections_correct']:,} of {counts['corrections']:,} corrections succeed."
    )
    yield (
        f"{findings['responses']:,} wrong responses to {findings['prompts']:,} prompts were audited with "
        f"{counts['rollouts']:,} continuations."
    )
    yield (
        f"In {findings['with_a_located_error']:,} of them one step costs at least {findings['min_drop']:.0%} "
        f"of the chance to end correct: the error. {findings['located_and_masked']:,} of these have a "
        "correction that earns credit."
    )
    if findings["largest_drop"] is not None:
        yield (
            f"The error costs {_number(findings['largest_drop'])} of the chance, and ends at "
            f"{_number(findings['position_of_the_drop'])} of the response."
        )


def _agreement(findings: Mapping[str, Any]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("does credit lie on the error?")
    for measure in _MEASURES.values():
        table.add_column(measure, justify="right")
    for name, scores in findings["mask"].items():
        table.add_row(_CREDITS.get(name, name), *(_number(scores.get(measure)) for measure in _MEASURES))
    return table


def _verdicts(findings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "AUC is the chance that the error has a larger share of credited tokens than another step of its "
        "response; .5 is no better than chance."
    )
    if (above := findings["mask_above_random_auc"]) is not None:
        comparison = "more often than" if (above["low"] or 0.0) > 0 else "not surely more often than"
        yield f"The mask lies on the error {comparison} random tokens: AUC higher by {_number(above)}."
    if (equal := findings["mask_equals_sibling"]) is not None:
        yield (
            f"A share of {_number(equal)} of the masks equals the difference to a correct response of the "
            "same group, which costs no correction."
        )
    phi = findings["phi"]
    yield (
        f"A share of {phi['positive']:.2f} of the wrong responses earns a bonus (φ > 0). The rank "
        f"correlation of φ with how near a response was to correct is {_number(phi['rank_correlation'])}, "
        f"and {_number(phi['rank_correlation_within_prompts'])} among responses to one prompt."
    )


def _number(value: Mapping[str, float | None] | None) -> str:
    """Return an estimate with its interval; a dash for what could not be measured."""
    if value is None or value["estimate"] is None:
        return _DASH
    low, high = value["low"], value["high"]
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{value['estimate']:.2f}{interval}"


def plot_audit(
    responses: Sequence[AuditedResponse], findings: dict[str, Any], path: Path, *, title: str
) -> None:
    """Plot the value along wrong responses, the places of its largest drops, and the agreement of credit with
    them."""
    with mpl.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(13, 3.8), dpi=120, layout="constrained")
        figure.suptitle(title)
        values, drops, agreement = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
        _draw_values(values, responses)
        _draw_drops(drops, responses, findings["min_drop"])
        _draw_agreement(agreement, findings)
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


def _draw_agreement(axes: Axes, findings: dict[str, Any]) -> None:
    bars = {name: measured["auc"] for name, measured in findings["mask"].items()}
    defined_bars = {name: bar for name, bar in bars.items() if bar is not None}
    for place, bar in enumerate(reversed(defined_bars.values())):
        low, high = bar["estimate"] - bar["low"], bar["high"] - bar["estimate"]
        axes.errorbar(bar["estimate"], place, xerr=[[max(low, 0)], [max(high, 0)]], fmt="o", capsize=3)
    axes.set_yticks(range(len(defined_bars)), list(reversed(defined_bars)))
    axes.axvline(0.5, color="grey", linewidth=0.8)
    axes.set_xlim(0, 1)
    axes.set_title("Agreement with the drop, AUC and 95 % interval")
