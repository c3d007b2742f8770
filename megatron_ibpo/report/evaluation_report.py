"""Output of a stand-alone evaluation: what it prints and saves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ibpo.evaluate import SetEvaluation
from megatron_ibpo.evaluate.results_file import finish_results
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE, samples_path
from megatron_ibpo.report.display import open_console
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
    console: Console | None = None,
) -> None:
    """Finish results.json, draw evaluation.png, and show the measures.

    Args:
        policy: the evaluated policy.
        seconds: seconds of this process by stage.
        counts: numbers of deaths.
    """
    from megatron_ibpo.report.evaluation_plot import plot_evaluation  # slow to import

    console = console or open_console()
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    content = finish_results(run_dir, evaluated, {"seconds_by_stage": rounded, "counts": dict(counts)})
    plot_evaluation(content["sets"], run_dir / PLOT_FILE, title=Path(policy).name)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for one in evaluated:
        say(f"{one.set.name}: {one.evaluation}")
    console.print(_table(content["sets"], [one.set.name for one in evaluated]))
    files = [RESULTS_FILE, *(samples_path(run_dir, one.set.name).name for one in evaluated), PLOT_FILE]
    for file in files:
        say(str(run_dir / file))


def _table(sets: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Return a table with a line per measure of each set."""
    table = Table("set", "", show_edge=False, pad_edge=False)
    for column in ("share", "95 % interval"):
        table.add_column(column, justify="right")
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
