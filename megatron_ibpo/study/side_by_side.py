"""Several runs of a study at a time, each a child process of its own thread."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from megatron_ibpo.basics.text import counted
from megatron_ibpo.study.plan import PlannedRun, Study
from megatron_ibpo.study.runs import Outcome, Program, execute, is_finished, summary


def run_all(
    study: Study,
    runs: Sequence[PlannedRun],
    program: Program,
    console: Console,
    *,
    parallel: int,
    at_most: int | None = None,
) -> int:
    """Run the unfinished runs in their order, `parallel` at a time, and return how many were run.

    The children and all their processes have ended when this function returns or raises.

    Args:
        at_most: limit of runs; None: all.

    Raises:
        ConfigError: a directory holds a finished run with other settings; found before anything is run.
    """
    open_runs = [run for run in runs if not is_finished(run)][:at_most]
    stop = threading.Event()
    with (
        Progress(TextColumn("{task.description}", markup=False), console=console, transient=True) as shown,
        ThreadPoolExecutor(parallel) as pool,
    ):
        started = {pool.submit(_run, run, study, program, shown, stop): run for run in open_runs}
        try:
            for number, done in enumerate(as_completed(started), start=1):
                outcome, seconds = done.result()
                console.print(
                    f"run {number}/{len(open_runs)} {started[done].label}: {outcome} after {seconds:.0f} s, "
                    f"{_accuracy(started[done])}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
        except BaseException:
            stop.set()  # running ones end themselves; the others must not begin
            pool.shutdown(cancel_futures=True)
            raise
    return len(open_runs)


def _run(
    run: PlannedRun, study: Study, program: Program, shown: Progress, stop: threading.Event
) -> tuple[Outcome, float]:
    line, started = shown.add_task(run.label), time.monotonic()

    def show(row: dict[str, Any]) -> None:
        spent = row[f"spent_{study.budget_unit.replace('-', '_')}"] / run.budget
        shown.update(line, description=f"{run.label}: step {row['step']}, {spent:.0%} of the budget")

    try:
        return execute(run, study, program, show, stop), time.monotonic() - started
    finally:
        shown.remove_task(line)


def _accuracy(run: PlannedRun) -> str:
    left = summary(run)
    if left is None:
        return f"see {run.directory.with_suffix('.log')}"
    found = left["accuracy_end"]
    return f"{counted(left['steps'], 'step')}, accuracy {found if found is None else round(found, 4)}"
