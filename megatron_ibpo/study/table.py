"""The table of a comparison, in Markdown."""

import math
from collections.abc import Sequence
from typing import Any

from megatron_ibpo.study.plan import Study

_COLUMNS = (
    "method", "G", "sequences per prompt", "tuned", "seeds", "steps", "spent", "FLOPs",
    "accuracy [95 %]", "greedy", "against baseline [95 %]", "p bootstrap", "p sign flip (floor)",
    "cost to threshold, of baseline",
)  # fmt: skip


def markdown_table(study: Study, lines: Sequence[dict[str, Any]]) -> str:
    """One line per method; what each number is stands below."""
    table = _table(_COLUMNS, [_cells(study, line) for line in lines])
    gradient = _gradient_table(lines)
    return f"{table}\n\n{_legend(study, lines)}\n" + (f"\n{gradient}\n" if gradient else "")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def _cells(study: Study, line: dict[str, Any]) -> list[str]:
    unit = study.budget_unit.replace("-", "_")
    cost = line["cost_to_threshold"]
    difference = line.get("difference")
    ratio = cost["of_baseline"]
    reached = f"{cost['reached']}/{line['seeds']} reached"
    return [
        line["method"],
        str(line["samples_per_prompt"]),
        f"{line['sequences_per_prompt']:.1f}",
        ", ".join(f"{key} {value:g}" for key, value in line["setting"].items()) or "–",
        str(line["seeds"]),
        f"{line['steps']:.0f}",
        f"{line['spent'][unit]:.4g}",
        f"{line['spent']['flops']:.2e}",
        _interval(line["accuracy"]),
        f"{line['greedy']:.3f}",
        _interval(difference, "+") if difference else "–",
        f"{difference['bootstrap_p']:.4f}" if difference else "–",
        f"{difference['sign_flip_p']:.4f} ({difference['sign_flip_floor']:.4f})" if difference else "–",
        f"{ratio:.2f}x, {reached}" if ratio is not None else reached,
    ]


def _interval(estimate: dict[str, float], sign: str = "") -> str:
    mean, low, high = (format(estimate[key], f"{sign}.3f") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _legend(study: Study, lines: Sequence[dict[str, Any]]) -> str:
    overshoot = max(
        (line["spent"][study.budget_unit.replace("-", "_")] / study.budget - 1 for line in lines),
        default=math.nan,
    )
    return (
        f"Budget {study.budget:g} {study.budget_unit.replace('-', ' ')} per run; sampling, corrections, "
        "scoring, updates and weight transfer are paid, evaluation is not. A run stops after the step that "
        f"spends the budget: at most {max(0.0, overshoot):.1%} over, on average over a method's seeds. "
        f"Baseline: {study.baseline}. Intervals: percentile bootstrap over seeds and problems together "
        "(problems alone where there is one seed). p: two-sided, paired; the sign-flip test's floor is the "
        "smallest p that so many seeds can give. Cost to threshold: spent until the mean training reward of "
        f"five steps reached {study.threshold:g}, median over seeds, over the baseline's."
    )


def _gradient_table(lines: Sequence[dict[str, Any]]) -> str:
    measured = [line for line in lines if line["gradient"]]
    if not measured:
        return ""
    names = list(dict.fromkeys(name for line in measured for name in line["gradient"]))
    header = ["method", *(name.replace("_", " ") for name in names)]
    rows = [
        [line["method"], *(f"{line['gradient'].get(name, math.nan):.3g}" for name in names)]
        for line in measured
    ]
    return _table(header, rows)
