"""Tables of a comparison, as rows of text and in Markdown."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ibpo.study.claims import SEEDS_TO_REPEAT, Claim, ClaimOutcome, Comparison
from megatron_ibpo.study.findings import Findings
from megatron_ibpo.study.plan import PublishedClaim, Study
from megatron_ibpo.study.statistics import WINDOW_RESPONSES, estimate, in_words, shown_p


@dataclass(frozen=True)
class Table:
    """One table of the page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str = ""


def tables(findings: Findings, compared: Comparison) -> list[Table]:
    """Return all tables that have rows, in the order of the page."""
    all_tables = [
        _verdicts(findings.study, compared),
        _published(compared.published),
        _overall(compared.overall),
    ]
    for task in findings.study.tasks:
        of_task = [line for line in compared.table if line["task"] == task.name]
        all_tables += [_methods(findings.study, task.name, of_task), _gradient(task.name, of_task)]
    all_tables += [_equal_amounts(compared.equal_amounts), _equal_steps(compared.equal_steps)]
    all_tables += [_doses(compared.dose_response), _tuning(findings)]
    return [table for table in all_tables if table.rows]


def markdown(findings: Findings, all_tables: Sequence[Table]) -> str:
    """Return the tables in Markdown, after the pilot's power analysis."""
    parts = [in_words(findings.power)] if findings.power is not None else []
    for table in all_tables:
        parts += [f"## {table.title}", lines_of(table)]
        parts += [table.legend] if table.legend else []
    parts += _origin(findings)
    return "\n\n".join(parts) + "\n"


def lines_of(table: Table) -> str:
    """Return the lines of a table in Markdown."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def brief(findings: Findings, compared: Comparison) -> list[Table]:
    """Return the results in few columns, for a page of documentation: the methods, the published claims, and
    accuracies at equal amounts, of a study of one task."""
    rows = [
        [
            line["method"],
            f"{_display(line['prompts_per_step'])}, {line['samples_per_prompt']}, {_display(line['lr'])}",
            str(line["seeds"]),
            f"{line['steps']:.0f}",
            interval(asdict(estimate(list(line["accuracy_by_seed"].values())))),
            f"{line['greedy']:.3f}",
            _operations(line["cost_to_threshold"]["median"]),
            _operations(line["cost_to_threshold"]["dear_decoding"]),
            " → ".join(f"{share:.2f}" for share in line["correction_success"]) or "–",
        ]
        for line in compared.table
    ]
    header = [
        "method", "P, G, lr", "seeds", "steps", "sampled [95 %, t]", "greedy",
        f"operations to {findings.study.threshold:g}", "the same, decoding x 10",
        "corrections right, first → last",
    ]  # fmt: skip
    amounts = _equal_amounts(compared.equal_amounts)
    tables = [Table("", header, rows), _published(compared.published), amounts]
    return [table for table in tables if table.rows]


def _origin(findings: Findings) -> list[str]:
    """Return a line about the code that made the runs; nothing if it was not recorded."""
    codes = sorted({run.code for run in findings.runs if run.code})
    seconds = sum(run.seconds or 0 for run in findings.runs)
    return [f"Code of the runs: {', '.join(codes)}. Seconds of all runs: {seconds:.0f}."] if codes else []


def _verdicts(study: Study, compared: Comparison) -> Table:
    rows = [
        [claim.method, claim.verdict, _standing(claim), "; ".join(claim.blocks)] for claim in compared.claims
    ]
    legend = (
        f"Against {study.baseline}, by the paired t test over seeds (level .05) with Holm's adjustment over "
        "the methods. A claim needs 8 seeds, tuning that did not end at the edge of its grid, all runs, and "
        "for a better method the same again with fresh seeds."
    )
    return Table(
        "What may be said", ["method", "this study", "claim", "what stands against it"], rows, legend
    )


def _published(outcomes: Sequence[ClaimOutcome]) -> Table:
    rows = [
        [
            outcome.claim.source,
            outcome.claim.claim,
            f"{outcome.claim.method} – {outcome.claim.than}"
            if outcome.claim.than
            else outcome.claim.method or "–",
            _measured(outcome.claim),
            str(outcome.seeds) if outcome.seeds else "–",
            interval(asdict(outcome.difference), "+") if outcome.difference is not None else "–",
            shown_p(outcome.holm_p),
            f"{outcome.outcome}: {outcome.claim.untestable}" if outcome.claim.untestable else outcome.outcome,
        ]
        for outcome in outcomes
    ]
    header = ["source", "claim", "runs", "measure", "seeds", "difference [95 %, t]", "p Holm", "outcome"]
    legend = (
        "A difference above 0 leans towards the claim. Of the cost to the threshold it is log₂ of the "
        "other's over the method's; a run that never reached it counts as if it had at its end. Repeated or "
        f"not repeated: shown, or its opposite shown, by {SEEDS_TO_REPEAT} seeds or more at level .05, "
        "adjusted over all claims tested. Undecided is no proof of equality."
    )
    return Table("Published claims", header, rows, legend)


def _measured(claim: PublishedClaim) -> str:
    return claim.measure + (f" on {claim.task}" if claim.task else "") if claim.method else "–"


def _standing(claim: Claim) -> str:
    if claim.verdict not in ("better", "worse"):
        return "–"
    return "no" if claim.blocks else "yes"


def _overall(lines: Sequence[dict[str, Any]]) -> Table:
    header = [
        "method", "seeds", "accuracy [95 %]", "against baseline [95 %]", "p t test", "p Holm", "by task",
        "p interaction",
    ]  # fmt: skip
    rows = [
        [
            line["method"],
            str(line["seeds"]),
            interval(line["accuracy"]),
            *_tests(line.get("difference")),
            *_by_task(line.get("difference")),
        ]
        for line in lines
    ]
    legend = (
        "Intervals: Student's t over seeds. By task: the differences on the tasks, in their order; p "
        "interaction: of the hypothesis that they are all the same (Hotelling's T², paired over seeds). A "
        "method that gains on some tasks and loses on others is called neither better nor worse where it is "
        "below .05."
    )
    return Table("Mean over the tasks", header, rows, legend)


def _by_task(difference: dict[str, Any] | None) -> list[str]:
    if difference is None:
        return ["–"] * 2
    return [", ".join(f"{mean:+.3f}" for mean in difference["by_task"]), shown_p(difference["interaction_p"])]


def _tests(difference: dict[str, Any] | None) -> list[str]:
    if difference is None:
        return ["–"] * 3
    return [interval(difference, "+"), shown_p(difference["p"]), shown_p(difference["holm_p"])]


def _methods(study: Study, task: str, lines: Sequence[dict[str, Any]]) -> Table:
    temperatures = list(dict.fromkeys(at for line in lines for at in line["other_accuracies"]))
    header = [
        "method", "P", "G", "lr", "sequences per prompt", "tuned", "seeds", "steps", "spent", "FLOPs",
        "accuracy [95 %]", *(f"T = {at} [95 %]" for at in temperatures), "greedy [95 %]",
        "against baseline [95 %]", "p t test", "p Holm",
        "cost to threshold, of baseline", "FLOPs to threshold, decoding x 10",
        "corrections right, first → last",
    ]  # fmt: skip
    title = "Methods" if not task else f"Methods on {task}"
    rows = [_cells(study, line, temperatures) for line in lines]
    return Table(title, header, rows, _legend(study, lines) if lines else "")


def _cells(study: Study, line: dict[str, Any], temperatures: Sequence[str]) -> list[str]:
    cost = line["cost_to_threshold"]
    ratio = cost["of_baseline"]
    reached = f"{cost['reached']}/{line['seeds']} reached"
    return [
        line["method"],
        _display(line["prompts_per_step"]),
        str(line["samples_per_prompt"]),
        _display(line["lr"]),
        f"{line['sequences_per_prompt']:.1f}",
        ", ".join(f"{key} {_display(value)}" for key, value in line["setting"].items()) or "–",
        str(line["seeds"]),
        f"{line['steps']:.0f}",
        f"{line['spent'][study.unit]:.4g}",
        f"{line['spent']['flops']:.2e}",
        interval(line["accuracy"]),
        *(interval(line["other_accuracies"].get(at)) for at in temperatures),
        interval(line["greedy_over_seeds"]),
        *_tests(line.get("difference")),
        f"{ratio:.2f}x, {reached}" if ratio is not None else reached,
        _operations(cost["dear_decoding"]),
        " → ".join(f"{share:.2f}" for share in line["correction_success"]) or "–",
    ]


def _operations(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2e}" if math.isfinite(value) else "not reached"


def _display(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def interval(estimate: dict[str, float] | None, sign: str = "") -> str:
    """Return `mean [low, high]` of an estimate, the mean alone without an interval, a dash without either."""
    if estimate is None:
        return "–"
    mean, low, high = (format(estimate[key], f"{sign}.3f") for key in ("mean", "low", "high"))
    return mean if math.isnan(estimate["low"]) else f"{mean} [{low}, {high}]"


def _legend(study: Study, lines: Sequence[dict[str, Any]]) -> str:
    budgets = {task.name: study.budget_of(task) for task in study.tasks}
    overshoot = max(
        (line["spent"][study.unit] / budgets[line["task"]] - 1 for line in lines), default=math.nan
    )
    return (
        f"Budget {study.budgets} per run; sampling, corrections, "
        "scoring, updates and weight transfer are paid, evaluation is not. A run stops after the step that "
        f"spends the budget: at most {max(0.0, overshoot):.1%} over, on average over a method's seeds. "
        f"Baseline: {study.baseline}. P prompts per step, G responses to each. Intervals: Student's t over "
        "seeds. p: two-sided, paired over seeds; Holm adjusts it over the methods. Cost to threshold: spent "
        "until the mean training "
        f"reward of the last {WINDOW_RESPONSES} responses, dropped groups included, reached "
        f"{study.threshold:g}; median over seeds, over the baseline's. Decoding x 10: if writing a token "
        "cost ten times as much as reading it. Corrections right: share in the first and last five steps."
    )


def _gradient(task: str, lines: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for line in lines for name in line["gradient"]))
    rows = [
        [line["method"], *(f"{line['gradient'].get(name, math.nan):.3g}" for name in names)]
        for line in lines
        if line["gradient"]
    ]
    title = f"Gradient{f' on {task}' if task else ''}, means over steps and seeds"
    return Table(title, ["method", *(name.replace("_", " ") for name in names)], rows)


def _equal_steps(lines: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            line["task"] or "–",
            line["method"],
            f"{line['first']} to {line['last']}",
            str(line.get("seeds", "–")),
            interval(line["reward"]) if "reward" in line else "fewer steps",
            interval(line.get("difference"), "+"),
        ]
        for line in lines
    ]
    header = ["task", "method", "steps", "seeds", "mean training reward [95 %]", "against baseline [95 %]"]
    legend = "What a step brings, whatever it costs. Intervals: Student's t over seeds; nothing is adjusted."
    return Table("At equal steps", header, rows, legend)


def _equal_amounts(lines: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            line["task"] or "–",
            line["method"],
            line["currency"],
            f"{line['amount']:.4g}",
            str(line["seeds"]),
            interval(line["accuracy"]),
            interval(line["baseline_accuracy"]),
            interval(line["difference"], "+"),
        ]
        for line in lines
    ]
    header = [
        "task", "method", "equal", "amount", "seeds", "accuracy [95 %]", "of the baseline [95 %]",
        "difference [95 %]",
    ]  # fmt: skip
    legend = (
        "Accuracy on held-out problems after the largest amount that all runs of both have spent, "
        "interpolated between evaluations. Intervals: Student's t over seeds; nothing is adjusted."
    )
    return Table("At equal amounts", header, rows, legend)


def _doses(points: Sequence[dict[str, Any]]) -> Table:
    rows = [[p["method"], p["task"], f"{p['skill']:.2f}", interval(p, "+")] for p in points]
    header = ["method", "task", "comparison skill", "against baseline [95 %]"]
    legend = "Skill: how much more often a correction with a correct reference succeeds than another try."
    return Table("Dose and response", header, rows, legend)


def _tuning(findings: Findings) -> Table:
    rows = [
        [
            choice.task or "–",
            choice.method,
            ", ".join(f"{key} {_display(value)}" for key, value in choice.setting.items()),
            " and ".join(choice.at_edge) or "–",
            "; ".join(
                f"{', '.join(_display(value) for value in run.setting.values())}: {run.accuracy:.3f}"
                for run in choice.tried
            ),
        ]
        for choice in findings.choices
    ]
    header = ["task", "method", "chosen", "at the edge", "tried: accuracy on the problems of tuning"]
    return Table("Tuning", header, rows)
