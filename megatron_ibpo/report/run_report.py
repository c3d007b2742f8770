"""The report of a run, one object to which the loop reports its events; and that of an evaluation on its
own."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from megatron_ibpo.basics.text import counted, without_keys
from megatron_ibpo.config import Config, display_name
from megatron_ibpo.evaluate import SetEvaluation
from megatron_ibpo.evaluate.sets import finish_results
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE, samples_path
from megatron_ibpo.report.display import (
    ProgressDisplay,
    Size,
    open_console,
    plain_table,
    sizes_table,
    warnings_shown,
)
from megatron_ibpo.report.metrics_log import MetricsLog
from megatron_ibpo.report.run_dir import (
    METRICS_FILE,
    PREDICTION_FILE,
    SUMMARY_FILE,
    how_to_go_on,
    jsonable,
    write_whole,
)
from megatron_ibpo.report.stages import Forecast, error_line
from megatron_ibpo.report.summary import HELD_OUT_LOSS, break_even_lines, measures, summarise


class Report:
    """Metrics, display, curves and summary of a run, on the driver.

    The program's warnings are shown above the progress. Closing it (it is a context manager) ends the display
    and the logs, and is safe at any time; `finish` writes curves.png and summary.json first. An error within
    the context finishes it too, and is the summary's status.
    """

    def __init__(
        self,
        config: Config,
        *,
        completed_steps: int = 0,
        console: Console | None = None,
        started: float | None = None,
        deaths: Callable[[], Mapping[str, int]] = dict,
        command: Literal["train", "sft"] = "train",
    ):
        """Report into config.run.run_dir, which must exist (`prepare_run_dir`).

        Args:
            completed_steps: steps completed before a resumed run; later rows of its log are removed.
            started: time.time() at the run's start; None: now. A process's own start will not do: the scripts
                become the run's process, and may have set up an environment for minutes before.
            deaths: returns the deaths and restarts in this process so far, by metric. A step's row has those
                since the row before it.
            command: command of the run, which resumes it too.
        """
        self._run_dir = config.run.run_dir
        model = display_name(config.model.hf_checkpoint) if config.model.hf_checkpoint else "no model"
        method = config.algorithm.advantage_estimator if command == "train" else command
        self._title, self._command = f"{method}, {model}", command
        self._started = time.time() if started is None else started
        self._seconds: dict[str, float] = {}  # by stage
        self._log = MetricsLog(
            self._run_dir,
            completed_steps=completed_steps,
            trackers=config.run.trackers,
            tracked_config=jsonable(dataclasses.asdict(config)),
        )
        self._display = ProgressDisplay(
            config.run.num_rollout, completed_steps=completed_steps, console=console
        )
        self._deaths, self._deaths_told = deaths, dict[str, int]()
        self._predicted: dict[str, float] | None = None
        self._finished = False
        self._warnings = ExitStack()
        self._warnings.enter_context(warnings_shown(self.note))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far."""
        return self._log.rows

    def sizes(self, sizes: Iterable[Size]) -> None:
        """Show the table of sizes."""
        self.note(f"{self._title} → {self._run_dir}")
        self._display.print(sizes_table(sizes))

    def note(self, text: str) -> None:
        """Show a line."""
        self._display.print(text)

    def predicted(self, forecast: Forecast) -> None:
        """Show the predicted time of a step, and keep it for the end of the run."""
        self.note(forecast.text)
        if forecast.seconds is None:
            return
        self._predicted = {name: round(float(value), 4) for name, value in forecast.seconds.items()}
        write_whole(self._run_dir / PREDICTION_FILE, json.dumps(self._predicted, indent=2) + "\n")

    def evaluation(
        self,
        step: int,
        evaluated: Sequence[SetEvaluation],
        seconds: Mapping[str, float],
        spent: Mapping[str, float] | None = None,
    ) -> None:
        """Record and show an evaluation made after `step` completed steps (0: before the first), in one row
        for all sets.

        Args:
            spent: metrics of the cost of training until then.
        """
        metrics = dict(spent or {})
        for set_evaluation in evaluated:
            metrics |= set_evaluation.set.metrics(set_evaluation.evaluation.metrics())
        self._record("evaluation", step, metrics, seconds)
        for set_evaluation in evaluated:
            of_set = f", {set_evaluation.set.name}" if set_evaluation.set.is_named else ""
            self.note(f"evaluation after {counted(step, 'step')}{of_set}: {set_evaluation.evaluation}")

    def held_out_loss(self, step: int, loss: float, seconds: Mapping[str, float]) -> None:
        """Record and show the loss per token of held-out demonstrations after `step` completed steps."""
        self._record("evaluation", step, {HELD_OUT_LOSS: loss}, seconds)
        self.note(f"held-out loss after {counted(step, 'step')}: {loss:.4f} per token")

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Record and show step number `step`, counted from 1, with its seconds by stage."""
        deaths = dict(self._deaths())
        metrics = dict(metrics) | self._since(deaths)
        self._record("step", step, metrics, seconds)
        self._deaths_told = deaths  # not earlier: a row that found no room is recorded again
        self._display.step(step, metrics, seconds)

    def finish(
        self, *, status: str = "finished", seconds: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Write curves.png and summary.json, show where they are, and return the summary.

        Args:
            status: end of the run: finished, interrupted, failed: …
            seconds: seconds after the last row (saving), by stage.
        """
        from megatron_ibpo.report.plots import plot_curves  # slow to import, and for the driver only

        self._count(seconds or {})
        self._finished = True
        self._display.close()
        summary = {"status": status} | summarise(
            self._log.rows,
            seconds_total=time.time() - self._started,
            seconds_by_stage=self._seconds,
            since=self._since(self._deaths()),
            predicted=self._predicted,
        )
        files = [self._run_dir / METRICS_FILE]
        for name, write in (
            (SUMMARY_FILE, lambda path: _write_summary(summary, path)),
            ("curves.png", lambda path: plot_curves(self._log.rows, path, title=self._title)),
        ):
            try:
                # a directory that was deleted during the run is not made again
                if self._run_dir.is_dir() and write(self._run_dir / name):
                    files.append(self._run_dir / name)
            except OSError as error:  # the results are shown all the same
                self.note(f"{self._run_dir / name} could not be written: {error.strerror}")
        # the command's error handler prints last why a run failed
        self.note(f"{status.partition(':')[0]}: {counted(summary['steps'], 'step')}")
        is_supervised = self._command == "sft"
        results = supervised_table(self._log.rows) if is_supervised else _results_table(summary)
        if results.row_count:
            self._display.print(results)
        self._display.print(_seconds_table(summary))
        for line in count_lines(summary["counts"]):
            self.note(line)
        for line in break_even_lines(summary["break_even"]):
            self.note(line)
        if self._predicted is not None and (errors := summary["prediction_error"]) is not None:
            self.note(error_line(self._predicted, errors))
        for file in files:
            self.note(str(file))
        if status != "finished":
            self.note(how_to_go_on(self._run_dir, self._command))
        return summary

    def close(self) -> None:
        self._warnings.close()
        self._display.close()
        self._log.close()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._finished:
                stopped = isinstance(error, KeyboardInterrupt)
                reason = without_keys(f"failed: {type(error).__name__}: {error}")
                self.finish(status="stopped at once" if stopped else reason)
        finally:
            self.close()

    def _record(
        self, kind: Any, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        self._log.append(kind, step, dict(metrics), dict(seconds))
        self._count(seconds)  # last: a row that found no room is recorded again

    def _since(self, deaths: Mapping[str, int]) -> dict[str, int]:
        """Return the deaths that no row has counted yet."""
        return {name: count - self._deaths_told.get(name, 0) for name, count in deaths.items()}

    def _count(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value


def _write_summary(summary: dict[str, Any], path: Path) -> bool:
    write_whole(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return True


def _results_table(summary: dict[str, Any]) -> Table:
    """Return a table with the start and end of each measure of the summary that was measured at either."""
    table = plain_table(("",), ("start", "end"))
    for key in (key.removesuffix("_start") for key in summary if key.endswith("_start")):
        values = summary[f"{key}_start"], summary[f"{key}_end"]
        if values != (None, None):
            table.add_row(measure_name(key), *("–" if x is None else f"{x:.3f}" for x in values))
    return table


def measure_name(key: str) -> str:
    """Return the measure's display name: pass_at_4 → pass@4, best_of_4 → best-of-4, others in words; for a
    set, aime25/pass_at_4 → aime25: pass@4."""
    names = {
        "accuracy": "accuracy, sampled",
        "greedy": "accuracy, greedy",
        "corrected": "accuracy, corrected",
        "reward": "training reward",
    }
    of_set, _, measure = key.rpartition("/")
    name = names.get(measure) or measure.replace("_at_", "@").replace("_", "-")
    return f"{of_set}: {name}" if of_set else name


def _seconds_table(summary: dict[str, Any]) -> Table:
    table = plain_table(("stage",), ("seconds", "share"))
    total = summary["seconds_total"]
    by_time = sorted(summary["seconds_by_stage"].items(), key=lambda item: -item[1])
    for stage, seconds in by_time:
        table.add_row(stage, f"{seconds:.1f}", f"{seconds / max(total, 1e-9):.0%}")
    table.add_section()
    table.add_row("whole run", f"{total:.1f}", "")
    return table


_KINDS = {
    "cut off at the length limit": ("truncated_responses", "truncated_corrections"),
    "taught nothing": (
        "degenerate_groups",
        "degenerate_correction_groups",
        "sequences_without_advantage",
        "weightless_responses",
        "empty_masks",
        "updates_empty",
    ),
    "limited": ("bonuses_withheld", "overlong_penalties_limited", "groups_filled_up"),
    "dropped": (
        "groups_discarded",
        "groups_refused",
        "groups_expired",
        "tokens_discarded",
        "skipped_pairs",
        "corrections_skipped",
    ),
}
"""Counts by the fate of the things counted. Counts that are not listed are of things that failed or died."""
_IN_WORDS = {
    "truncated_responses": "responses",
    "truncated_corrections": "corrections",
    "skipped_pairs": "wrong responses not corrected because the prompt would be too long",
    "degenerate_groups": "groups of responses with equal rewards",
    "degenerate_correction_groups": "groups of corrections with equal rewards",
    "groups_filled_up": "groups taken for want of informative ones",
}
"""Counts whose names in the log do not read as words."""


def count_lines(counts: Mapping[str, int]) -> list[str]:
    """Return in words what was cut off, taught nothing, was dropped or failed in the run, a line for each of
    these that occurred."""
    named = {name for names in _KINDS.values() for name in names}
    kinds = _KINDS | {"failed": tuple(name for name in counts if name not in named)}
    lines = []
    for kind, names in kinds.items():
        parts = [
            f"{counts[name]:,} {_IN_WORDS.get(name) or name.replace('_', ' ')}"
            for name in names
            if counts.get(name)
        ]
        lines += [f"{kind}: {', '.join(parts)}"] if parts else []
    return lines


_BEFORE_AND_AFTER = {
    "loss": ("training loss per token", "step"),
    HELD_OUT_LOSS: ("held-out loss per token", "evaluation"),
    "grad_norm": ("gradient norm", "step"),
    "entropy": ("entropy per token", "step"),
}
"""Metric → its display name, and the kind of the rows that have it."""
_TOTALS = {"loss_tokens": "tokens in the loss", "tokens": "tokens, prompts included"}


def supervised_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of first and last values, and of totals over all steps.

    Args:
        rows: metrics.jsonl. Measures without values are left out.
    """
    table = plain_table(("",), ("first", "last"))
    for metric, (name, kind) in _BEFORE_AND_AFTER.items():
        values = [row[metric] for row in rows if row["kind"] == kind and metric in row]
        if values:
            table.add_row(name, f"{values[0]:.4f}", f"{values[-1]:.4f}")
    steps = [row for row in rows if row["kind"] == "step"]
    if steps:
        table.add_section()
    if steps and "epoch" in steps[-1]:
        table.add_row("passes over the rows", "", f"{steps[-1]['epoch']:.2f}")
    for metric, name in _TOTALS.items():
        if steps:
            table.add_row(name, "", f"{sum(row[metric] for row in steps):,}")
    return table


# ------------------------------------------------------------------------------ an evaluation on its own

EVALUATION_PLOT = "evaluation.png"


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
    from megatron_ibpo.report.plots import plot_evaluation  # slow to import

    console = open_console()
    rounded = {name: round(value, 2) for name, value in seconds.items()}
    content = finish_results(run_dir, evaluated, {"seconds_by_stage": rounded, "counts": dict(counts)})
    plot_evaluation(content["sets"], run_dir / EVALUATION_PLOT, title=Path(policy).name)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for set_evaluation in evaluated:
        say(f"{set_evaluation.set.name}: {set_evaluation.evaluation}")
    console.print(_measures_table(content["sets"], [set_evaluation.set.name for set_evaluation in evaluated]))
    files = [
        RESULTS_FILE,
        *(samples_path(run_dir, set_evaluation.set.name).name for set_evaluation in evaluated),
        EVALUATION_PLOT,
    ]
    for file in files:
        say(str(run_dir / file))


def _measures_table(sets: Mapping[str, Any], names: Sequence[str]) -> Table:
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
