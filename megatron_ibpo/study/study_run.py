"""A study from its plan to its page: predicted, tuned, run, resumed, compared, confirmed."""

import fcntl
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from megatron_ibpo.basics.text import counted
from megatron_ibpo.basics.versions import installed_versions
from megatron_ibpo.config import ConfigError
from megatron_ibpo.study.claims import compare_all, winners
from megatron_ibpo.study.findings import Findings, write_findings
from megatron_ibpo.study.page import write_page
from megatron_ibpo.study.plan import (
    Choice,
    PlannedRun,
    Settings,
    Study,
    Tried,
    beyond,
    choose,
    plan_point,
    plan_runs,
    plan_tuning,
)
from megatron_ibpo.study.run_results import RunResult, read_run
from megatron_ibpo.study.runs import Outcome, Program, execute, is_finished, summary
from megatron_ibpo.study.statistics import PowerAnalysis, analyse, in_words
from megatron_ibpo.weights.formats.checkpoint_files import has_weights, without_weights

OVERHEAD_S = 40.0
"""Seconds that a run is assumed to take on top of its budget (start, evaluation) before any was measured."""

MOST_EXTENSIONS = 4
"""Most values by which a grid is extended, one after the other, while its best lies at an end."""


def conduct(
    study: Study,
    directory: Path,
    program: Program,
    console: Console,
    *,
    parallel: int = 1,
    runs_at_most: int | None = None,
) -> bool:
    """Run the unfinished runs, then write results.json, table.md, curves and page.html into `directory`.
    Return whether every run of the study is finished.

    Args:
        program: entry point of a run: training.
        parallel: runs at a time.
        runs_at_most: stop after this many runs; a later call continues with the rest.

    Raises:
        ConfigError: a method's settings cannot work, found before anything is run; another process works in
            the same directory; or seconds would be compared between runs that share the machine.
    """
    if parallel > 1 and study.budget_unit == "accelerator-seconds":
        raise ConfigError(
            "--parallel: runs that share the machine slow each other down, and the budget is in seconds; "
            "give --budget-unit flops or tokens"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        return _Conductor(study, directory, program, console, parallel, runs_at_most).conduct()


@dataclass
class _Conductor:
    study: Study
    directory: Path
    program: Program
    console: Console
    parallel: int
    runs_left: int | None
    """Runs that may still be run; None: any number."""
    said_doubts: set[str] = field(default_factory=set)
    """Warnings that the user has seen."""

    def conduct(self) -> bool:
        study, tuning = self.study, plan_tuning(self.study, self.directory)
        planned = [*tuning, *self._pilot({}), *plan_runs(study, self.directory, "main")]
        self._say(_announcement(study, planned))
        if self.runs_left != 0:
            _check_policies(planned)
        choices = self._tune(tuning)
        if choices is None:
            self._say_rest(planned, "tuning")
            return False
        chosen = {(choice.task, choice.method): choice.setting for choice in choices}
        for choice in choices:
            self._say(_tuned(choice))
        pilot = self._pilot(chosen)
        if not self._run(pilot):
            self._say_rest([*pilot, *plan_runs(study, self.directory, "main", chosen)], "the pilot")
            return False
        findings = Findings(study, [], choices, self._power(pilot))
        self._say(in_words(findings.power) if findings.power else _NO_PILOT)
        main = plan_runs(study, self.directory, "main", chosen)
        complete = self._run(main)
        findings = replace(
            findings, runs=self._results(main), runs_left=sum(not is_finished(run) for run in main)
        )
        self._say(f"{len(findings.runs)} of {len(main)} runs are finished")
        if complete and study.confirm_seeds:
            confirmation_runs = self._confirmation(findings, chosen)
            complete = self._run(confirmation_runs)
            if complete:  # a part of it confirms nothing, and may lack runs of the baseline
                findings = replace(findings, confirmation=self._results(confirmation_runs))
            main += confirmation_runs
        if not complete:
            self._say_rest(main, "the study")
        if not any(run.method == study.baseline for run in findings.runs):
            self._say(f"no run of the baseline {study.baseline} is finished: no table yet")
            return complete
        self._write(findings)
        return complete

    def _tune(self, planned: Sequence[PlannedRun]) -> list[Choice] | None:
        """Tune each method on each task and return the choices; None while tuning is not finished."""
        if not self._run(planned):
            return None
        of_method: dict[tuple[str, str], list[PlannedRun]] = {}
        for run in planned:
            of_method.setdefault((run.task, run.method), []).append(run)
        for _ in range(MOST_EXTENSIONS):
            choices = [self._choice(*which, runs) for which, runs in of_method.items()]
            tried = {run.directory for runs in of_method.values() for run in runs}
            extensions = [r for choice in choices for r in self._beyond(choice) if r.directory not in tried]
            if not extensions:
                break
            if not self._run(extensions):
                return None
            for run in extensions:
                of_method[run.task, run.method].append(run)
        return [self._choice(*which, runs) for which, runs in of_method.items()]

    def _choice(self, task: str, method: str, runs: Sequence[PlannedRun]) -> Choice:
        results = [(run, read_run(run, self.study.unit)) for run in runs if is_finished(run)]
        if not results:
            raise ConfigError(f"every tuning run of {method} failed; see their logs")
        tried = [
            Tried(run.setting, run.seed, result.accuracy[-1][1], result.greedy, result.steps)
            for run, result in results
        ]
        return choose(task, method, tried)

    def _beyond(self, choice: Choice) -> list[PlannedRun]:
        """Return the runs that extend the grid where the best lies at its edge, without refused settings."""
        study, runs = self.study, list[PlannedRun]()
        assert study.tune is not None
        task = next(task for task in study.tasks if task.name == choice.task)
        for point in beyond(choice).values():
            with suppress(ConfigError):
                runs += plan_point(study, self.directory, task, choice.method, point, study.tune.seeds)
        return runs

    def _pilot(self, chosen: dict[tuple[str, str], Settings]) -> list[PlannedRun]:
        study = self.study
        return plan_runs(study, self.directory, "pilot", chosen, [study.baseline])

    def _power(self, pilot: Sequence[PlannedRun]) -> PowerAnalysis | None:
        """Analyse the baseline's accuracies in the pilot: for each seed, their mean over the tasks."""
        by_seed: dict[int, list[float]] = {}
        for result in self._results(pilot):
            by_seed.setdefault(result.seed, []).append(result.accuracy[-1][1])
        accuracies = [
            statistics.fmean(by_task) for by_task in by_seed.values() if len(by_task) == len(self.study.tasks)
        ]
        return analyse(
            accuracies,
            seeds=len(self.study.seeds),
            tests=len(self.study.methods) - 1,
            source=f"{counted(len(accuracies), 'run')} of {self.study.baseline} per task",
        )

    def _confirmation(self, findings: Findings, chosen: dict[tuple[str, str], Settings]) -> list[PlannedRun]:
        """Return runs with fresh seeds of the baseline and the methods that beat it, if any did."""
        better = winners(findings)
        if not better:
            return []
        self._say(f"with fresh seeds: {', '.join(better)}")
        methods = [self.study.baseline, *better]
        return plan_runs(self.study, self.directory, "confirmation", chosen, methods)

    def _results(self, runs: Sequence[PlannedRun]) -> list[RunResult]:
        return [read_run(run, self.study.unit, run.setting) for run in runs if is_finished(run)]

    def _run(self, runs: Sequence[PlannedRun]) -> bool:
        """Run them, and return whether later phases can build on them. A tuning run that failed for good, as
        its summary says, is not a candidate, and nothing waits for it."""
        self._say_doubts(runs)
        ran = run_all(
            self.study, runs, self.program, self.console, parallel=self.parallel, at_most=self.runs_left
        )
        if self.runs_left is not None:
            self.runs_left -= ran
        return all(is_finished(run) or _is_lost(run) for run in runs)

    def _say_doubts(self, runs: Sequence[PlannedRun]) -> None:
        """Say once which methods have settings that may not be intended."""
        methods: dict[str, list[str]] = {}
        for run in runs:
            for doubt in run.doubts:
                methods.setdefault(doubt, []).append(run.method)
        for doubt, of_doubt in methods.items():
            if doubt not in self.said_doubts:
                self._say(f"warning: {', '.join(dict.fromkeys(of_doubt))}: {doubt}")
        self.said_doubts |= methods.keys()

    def _write(self, findings: Findings) -> None:
        versions = installed_versions() | {"command": " ".join(sys.argv[1:])}
        findings = replace(findings, versions=versions)
        tables = compare_all(findings)
        write_findings(self.directory / "results.json", findings, asdict(tables))
        for path in write_page(findings, tables, self.directory, self.console):
            self.console.print(str(path), highlight=False)
        for claim in tables.claims:
            self._say("; but ".join([f"{claim.method}: {claim.verdict}", *claim.blocks]))

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _say_rest(self, runs: Sequence[PlannedRun], phase: str) -> None:
        self._say(f"{phase} is not finished: start it again to continue, {_remaining_cost(self.study, runs)}")


_NO_PILOT = "power: unknown; with pilot-seeds the study runs the baseline first and estimates it"


def _is_lost(run: PlannedRun) -> bool:
    run_summary = summary(run)
    return run.phase == "tuning" and run_summary is not None and run_summary["status"].startswith("failed")


def _tuned(choice: Choice) -> str:
    name = f"{choice.task}, {choice.method}" if choice.task else choice.method
    edge = f"; {' and '.join(choice.at_edge)} AT THE EDGE of the grid" if choice.at_edge else ""
    return f"{name}: tuned to {', '.join(f'{key} {value}' for key, value in choice.setting.items())}{edge}"


def _check_policies(planned: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if a run that is still to be run starts from a directory without weights. A stopped
    run has a summary and starts anew; that of a finished run may have settings that tuning chose."""
    finished = [run for run in planned if (summary(run) or {}).get("status") == "finished" or _is_lost(run)]
    policies = {run.policy for run in planned if run not in finished}
    missing = [path for path in policies if path is not None and path.is_dir() and not has_weights(path)]
    if missing:
        raise ConfigError("; ".join(sorted(map(without_weights, missing))))


def _announcement(study: Study, runs: Sequence[PlannedRun]) -> str:
    kinds = [(len(study.tasks), "task"), (len(study.methods), "method"), (len(study.seeds), "seed")]
    parts = [f"{study.name}: {' x '.join(counted(number, noun) for number, noun in kinds)}"]
    main = len(study.tasks) * len(study.methods) * len(study.seeds)
    if num_earlier := len(runs) - main:
        parts.append(f"{counted(num_earlier, 'run')} of tuning and pilot")
    num_present = sum(summary(run) is not None for run in runs)
    parts += [
        f"budget {study.budgets}, {sum(run.budget for run in runs):g} in all",
        f"{num_present} of {len(runs)} runs are there already",
        _remaining_cost(study, runs),
    ]
    return ", ".join(parts)


def _remaining_cost(study: Study, runs: Sequence[PlannedRun]) -> str:
    # tuning must end before it is known whether a main run has the tuned settings
    summaries = [(run, summary(run)) for run in runs]
    measured = [(run, ending["seconds_total"]) for run, ending in summaries if ending is not None]
    open_runs = [run for run, ending in summaries if ending is None]
    seconds = _predicted(study, measured, open_runs)
    budget = f"{sum(run.budget for run in open_runs):g} {study.budget_unit}"
    cost = f"{counted(len(open_runs), 'run')} to go, {budget}"
    if seconds is None:
        return f"{cost}, duration unknown"
    return f"{cost}, about {seconds / 60:.0f} minutes one after the other"


def _predicted(
    study: Study, measured: Sequence[tuple[PlannedRun, float]], open_runs: Sequence[PlannedRun]
) -> float | None:
    """Return the seconds for the open runs, estimated from the finished ones; None if nothing tells how long
    this many tokens or operations take."""
    if study.budget_unit == "accelerator-seconds":
        extra = [seconds - run.budget / study.processes for run, seconds in measured]
        overhead = statistics.fmean(extra) if extra else OVERHEAD_S
        return sum(run.budget / study.processes + overhead for run in open_runs)
    if not measured:
        return None
    per_budget = statistics.fmean(seconds / run.budget for run, seconds in measured)
    return sum(run.budget * per_budget for run in open_runs)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory, since two processes would run the same runs."""
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{directory}: another process is running this study") from None
        yield


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
        Progress(TextColumn("{task.description}", markup=False), console=console, transient=True) as progress,
        ThreadPoolExecutor(parallel) as pool,
    ):
        started = {pool.submit(_run, run, study, program, progress, stop): run for run in open_runs}
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
    run: PlannedRun, study: Study, program: Program, progress: Progress, stop: threading.Event
) -> tuple[Outcome, float]:
    line, started = progress.add_task(run.label), time.monotonic()

    def show(row: dict[str, Any]) -> None:
        spent = row[f"spent_{study.unit}"] / run.budget
        progress.update(line, description=f"{run.label}: step {row['step']}, {spent:.0%} of the budget")

    try:
        return execute(run, study, program, show, stop), time.monotonic() - started
    finally:
        progress.remove_task(line)


def _accuracy(run: PlannedRun) -> str:
    ending = summary(run)
    if ending is None:
        return f"see {run.directory.with_suffix('.log')}"
    accuracy = ending["accuracy_end"]
    rounded = None if accuracy is None else round(accuracy, 4)
    return f"{counted(ending['steps'], 'step')}, accuracy {rounded}"
