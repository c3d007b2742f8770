"""What an evaluation on its own shows and keeps."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ibpo.evaluate import Evaluation
from megatron_ibpo.records import Prompt, Sample
from megatron_ibpo.report.display import open_console
from megatron_ibpo.report.outcomes import outcomes_path, save_outcomes
from megatron_ibpo.report.run_dir import SUMMARY_FILE, write_whole
from megatron_ibpo.report.run_report import measure_name
from megatron_ibpo.report.summary import measures


def report_evaluation(
    run_dir: Path,
    policy: Path,
    evaluation: Evaluation,
    outcomes: Sequence[tuple[Prompt, Sample]],
    *,
    seconds: Mapping[str, float],
    counts: Mapping[str, int],
    console: Console | None = None,
) -> None:
    """Write summary.json and the outcomes, as those of a policy after 0 steps, and show the measures.

    Args:
        policy: the checkpoint that was evaluated.
        seconds: by stage.
        counts: of what died.
    """
    console = console or open_console()
    kept = outcomes_path(run_dir, 0)
    save_outcomes(kept, 0, outcomes)
    metrics = evaluation.metrics()
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    summary = {"policy": str(policy), **metrics, "seconds_by_stage": rounded, "counts": dict(counts)}
    path = run_dir / SUMMARY_FILE
    write_whole(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    console.print(f"evaluation: {evaluation}", highlight=False, markup=False, soft_wrap=True)
    console.print(_table(metrics))
    for file in (path, kept):
        console.print(str(file), highlight=False, markup=False, soft_wrap=True)


def _table(metrics: Mapping[str, float]) -> Table:
    table = Table("", show_edge=False, pad_edge=False)
    for column in ("share", "95 % interval"):
        table.add_column(column, justify="right")
    interval = f"{metrics['accuracy_low']:.3f} to {metrics['accuracy_high']:.3f}"
    for name, metric in measures(metrics).items():
        known = interval if metric == "accuracy" else ""
        table.add_row(measure_name(name), f"{metrics[metric]:.3f}", known)
    return table
