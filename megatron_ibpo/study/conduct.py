"""A study from its plan to its table: predicted, run, resumed, compared."""

import fcntl
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from megatron_ibpo.config import ConfigError
from megatron_ibpo.study.curves import plot_comparison
from megatron_ibpo.study.plan import PlannedRun, Settings, Study, plan_main, plan_tuning
from megatron_ibpo.study.results import RunResult, best_setting, compare, read_run, write_results
from megatron_ibpo.study.runs import execute, is_finished, summary
from megatron_ibpo.study.table import markdown_table
from megatron_ibpo.words import counted

OVERHEAD_S = 40.0
"""Seconds that a run is assumed to take on top of its budget (start, evaluation) before one was seen."""


def conduct(study: Study, directory: Path, console: Console, *, runs_at_most: int | None = None) -> bool:
    """Run what is not finished yet, then write results.json, table.md and curves into `directory`.

    Args:
        runs_at_most: stop after so many runs; the rest is for the next time.

    Returns:
        whether every run of the study is finished.

    Raises:
        ConfigError: a method's settings cannot work; found before anything is run. Or another process works
            in the same directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        tuning, main = plan_tuning(study, directory), plan_main(study, directory)
        _announce(study, tuning, main, console)
        left = [len(tuning) + len(main) if runs_at_most is None else runs_at_most]
        _run_all(study, tuning, console, left)
        chosen = _chosen(study, tuning)
        if chosen is None:
            console.print("not all tuning runs are finished: start again to go on")
            return False
        for method, settings in chosen.items():
            console.print(f"{method}: tuned to {settings}", highlight=False)
        main = plan_main(study, directory, chosen)
        _run_all(study, main, console, left)
        finished = [run for run in main if is_finished(run)]
        console.print(f"{len(finished)} of {len(main)} runs are finished", highlight=False)
        if finished:
            results = [read_run(run, study.budget_unit, chosen.get(run.method)) for run in finished]
            _write(study, results, directory, console)
        return len(finished) == len(main)


def _run_all(study: Study, runs: Sequence[PlannedRun], console: Console, left: list[int]) -> None:
    for number, run in enumerate(runs, start=1):
        if is_finished(run) or left[0] <= 0:
            continue
        left[0] -= 1
        label = f"{run.method}, seed {run.seed}" + ("" if run.value is None else f", {run.value}")
        started = time.monotonic()
        with console.status(label) as status:

            def show(row: dict[str, Any], run: PlannedRun = run, label: str = label) -> None:
                spent = row[f"spent_{study.budget_unit.replace('-', '_')}"]
                status.update(escape(f"{label}: step {row['step']}, {spent / run.budget:.0%} of the budget"))

            outcome = execute(run, study, show)
        seconds = time.monotonic() - started
        console.print(
            f"run {number}/{len(runs)} {label}: {outcome} after {seconds:.0f} s, {_accuracy(run)}",
            highlight=False,
            markup=False,
        )


def _accuracy(run: PlannedRun) -> str:
    left = summary(run)
    if left is None:
        return f"see {run.directory.with_suffix('.log')}"
    found = left["accuracy_end"]
    return f"{counted(left['steps'], 'step')}, accuracy {found if found is None else round(found, 4)}"


def _chosen(study: Study, tuning: Sequence[PlannedRun]) -> dict[str, Settings] | None:
    """What each method was tuned to; None while tuning is not finished. A value whose run failed for good
    (its summary says so) counts as no candidate."""
    if study.tune is None:
        return {}
    candidates: dict[str, list[tuple[PlannedRun, RunResult]]] = {}
    for run in tuning:
        if is_finished(run):
            result = read_run(run, study.budget_unit)
            candidates.setdefault(run.method, []).append((run, result))
        elif not ((left := summary(run)) and left["status"].startswith("failed")):
            return None
    if lost := study.methods.keys() - candidates.keys():
        raise ConfigError(f"every tuning run of {', '.join(sorted(lost))} failed; see their logs")
    return {method: {study.tune.setting: best_setting(found)} for method, found in candidates.items()}


def _announce(
    study: Study, tuning: Sequence[PlannedRun], main: Sequence[PlannedRun], console: Console
) -> None:
    """Say what will be run and what it will cost."""
    runs = [*tuning, *main]
    # whether a main run has the settings that are tuned is known after tuning only
    known = [(run, left["seconds_total"]) for run in runs if (left := summary(run)) is not None]
    seconds = _predicted(study, known, [run for run in runs if summary(run) is None])
    parts = [f"{study.name}: {counted(len(study.methods), 'method')} x {counted(len(study.seeds), 'seed')}"]
    if tuning:
        parts.append(counted(len(tuning), "tuning run"))
    parts += [
        f"budget {study.budget:g} {study.budget_unit}, {sum(run.budget for run in runs):g} in all",
        f"{len(known)} of {len(runs)} runs are there already",
        "how long the rest takes is not known beforehand"
        if seconds is None
        else f"about {seconds / 60:.0f} minutes to go",
    ]
    console.print(", ".join(parts), highlight=False, soft_wrap=True)


def _predicted(
    study: Study, seen: Sequence[tuple[PlannedRun, float]], open_runs: Sequence[PlannedRun]
) -> float | None:
    """Seconds for the open runs, from those that the others took; None where nothing tells how long so many
    tokens or operations take."""
    if study.budget_unit == "accelerator-seconds":
        extra = [seconds - run.budget / study.processes for run, seconds in seen]
        overhead = statistics.fmean(extra) if extra else OVERHEAD_S
        return sum(run.budget / study.processes + overhead for run in open_runs)
    if not seen:
        return None
    per_budget = statistics.fmean(seconds / run.budget for run, seconds in seen)
    return sum(run.budget * per_budget for run in open_runs)


def _write(study: Study, results: Sequence[RunResult], directory: Path, console: Console) -> None:
    if not any(result.method == study.baseline for result in results):
        console.print(f"no run of the baseline {study.baseline} is finished: no table yet")
        return
    lines = compare(study, results)
    table = markdown_table(study, lines)
    write_results(directory / "results.json", study, results, lines)
    (directory / "table.md").write_text(table, encoding="utf-8")
    plot_comparison(study, results, [directory / "curves.png", directory / "curves.svg"])
    console.print(table, highlight=False, markup=False, soft_wrap=True)
    for name in ("results.json", "table.md", "curves.png", "curves.svg"):
        console.print(str(directory / name), highlight=False)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two processes would run the same runs."""
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{directory}: another process is at this study") from None
        yield
