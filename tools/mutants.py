"""Plant faults, and report which of them a fast test notices.

    python tools/mutants.py --make-map               which test runs which line: half an hour
    python tools/mutants.py --save tools/results/mutants.json
    python tools/mutants.py --only "no warm-up" "the same prompts every step"
    python tools/mutants.py --sample 300 --save tools/results/mutant_sample.json      drawn by lot; resumable

Each fault of mutants.yaml is planted in a copy of the last commit. The tests that run a changed line, by the
coverage map, are run there until one fails, for a minute: first the file that is meant for the fault or named
like the source, then the tests that take least time. The exit status is 0 if every fault without a
`survives` (the reason) is noticed. Reasons for drawn faults are in equivalent_mutants.yaml.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import coverage
import mutants_plugin
import yaml
from mutation_sample import drawn, named_edits
from rich.console import Console
from rich.table import Table

from megatron_ibpo.basics.entry_point import DONE, FAILED, run_tool
from megatron_ibpo.basics.versions import machine

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "build/coverage_map.json"
LIST = ROOT / "tools/mutants.yaml"
EQUIVALENT = ROOT / "tools/equivalent_mutants.yaml"
"""Name of a drawn fault → why it changes nothing that a test could see."""
LONGEST_S = 60
HANGS_S = 20.0
"""A test that has taken this long when time is up may hang by the fault; it is run again without it."""
RUNNING = ".running"
"""Ending of the file that names the test under way."""
COPIES = 2
"""Copies at a time; a test process takes about a core."""
PROCESSES = "processes"
"""Context of imports, and of all processes that tests start, whichever test it was."""
SECONDS = "seconds"
"""Key of the map for the seconds of each test."""
MOST_TESTS = 400
"""Tests for one fault: a minute is over by then."""
FILES_AT_A_TIME = (2, 6)
"""Test files of the first runs of pytest; the last run gets the rest. To collect a file may take seconds."""
PRELOADED = ("pytest", "hypothesis", "megatron.core.models.gpt", "transformers")
"""Imported once: pytest is forked with them, which saves seven seconds of each run."""
STARTS = ("run_ranks", "subprocess", "start_script")
"""Words in a test file that starts processes."""
SEPARATE_FOLDERS = ("gpu", "interpreted")
"""Folders whose tests run by themselves: on a GPU, and under Triton's interpreter."""
SETTINGS = f"""
[run]
source = megatron_ibpo
parallel = true
data_file = DIRECTORY/data
context = {PROCESSES}
patch = subprocess, _exit
sigterm = true
disable_warnings = no-data-collected
"""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(PRELOADED))
CoverageMap = dict[str, dict[str, list[int]]]
"""Source file → test (FILE::FUNCTION, FILE alone for what its tests share) → source lines that it runs."""


@dataclass
class Arguments:
    only: tuple[str, ...] = ()
    """Names of faults; all by default."""
    make_map: bool = False
    """Run the fast tests under coverage, and keep which file runs which line."""
    sample: int | None = None
    """Draw this many faults by lot, in place of those of the list."""
    seed: int = 7
    """Seed of the draw."""
    save: Path | None = None
    """JSON file for the results, written after each fault. Drawn faults that it holds are not tried again."""


@dataclass(frozen=True)
class Mutant:
    """A fault."""

    name: str
    room: str
    file: str
    changes: tuple[tuple[str, str], ...]
    """(text, replacement); each text occurs once."""
    first: str | None
    """The test file that is meant to notice it, if its name does not say so."""
    survives: str | None
    """Reason why no fast test need notice it."""

    def planted(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: a text does not occur once.
        """
        for old, new in self.changes:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {self.file} has its text {source.count(old)} times")
            source = source.replace(old, new)
        return source

    def lines(self, source: str) -> set[int]:
        """Return the numbers of the changed lines, before the change."""
        numbers: set[int] = set()
        for old, _ in self.changes:
            first = source[: source.index(old)].count("\n") + 1
            numbers |= set(range(first, first + old.count("\n") + 1))
        return numbers


@dataclass(frozen=True)
class Verdict:
    """The result for a fault."""

    name: str
    room: str
    file: str
    noticed_by: str | None
    """The first test that failed."""
    why_not: str | None
    seconds: float
    tests: int
    """Number of tests that could notice it."""


@dataclass(frozen=True)
class Unfinished:
    """What ran when time was up."""

    test: str
    """Empty if none had begun."""
    seconds: float


def main(arguments: Arguments) -> int:
    """Plant the faults; return the exit status."""
    if arguments.make_map:
        make_map()
        return DONE
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # read where libraries are imported
    if not MAP.exists():
        raise ValueError(f"{MAP} is not there; --make-map makes it")
    listed = drawn_mutants(arguments.sample, arguments.seed) if arguments.sample else read_mutants()
    mutants = [mutant for mutant in listed if not arguments.only or mutant.name in arguments.only]
    if unknown := {*arguments.only} - {mutant.name for mutant in mutants}:
        raise ValueError(f"{LIST}: no fault is called {', '.join(sorted(unknown))}")
    results = Results(arguments.save, [mutant.name for mutant in listed])
    if arguments.sample and not arguments.only:
        mutants = [mutant for mutant in mutants if mutant.name not in results.rows]
    tests = json.loads(MAP.read_text())
    seconds = tests.pop(SECONDS)
    copies: Queue[Path] = Queue()

    def try_one(mutant: Mutant) -> Verdict:
        verdict = tried(mutant, tests, seconds, copies)
        results.add(verdict)
        return verdict

    with copied() as directories, ThreadPoolExecutor(COPIES) as threads:
        for directory in directories:
            copies.put(directory)
        verdicts = list(threads.map(try_one, mutants))
    show(verdicts)
    return (
        FAILED if any(mutant.noticed_by is None and mutant.why_not is None for mutant in verdicts) else DONE
    )


def read_mutants() -> list[Mutant]:
    """Return all faults of the list."""
    return [mutant_of(entry) for entry in yaml.safe_load(LIST.read_text())]


def mutant_of(entry: dict[str, Any]) -> Mutant:
    """Return a fault from its entry in a list."""
    changes = tuple((change["old"], change["new"]) for change in entry.get("changes", [entry]))
    return Mutant(
        entry["name"],
        entry.get("room", ""),
        entry["file"],
        changes,
        entry.get("first"),
        entry.get("survives"),
    )


def drawn_mutants(count: int, seed: int) -> list[Mutant]:
    """Return faults that are drawn by lot."""
    reasons = yaml.safe_load(EQUIVALENT.read_text()) or {} if EQUIVALENT.exists() else {}
    return [
        Mutant(name, room, file, ((edit.old, edit.new),), None, reasons.get(name))
        for name, room, file, edit in named_edits(drawn(ROOT / "megatron_ibpo", count, seed), ROOT)
    ]


def tried(mutant: Mutant, tests: CoverageMap, seconds: dict[str, float], copies: Queue[Path]) -> Verdict:
    """Plant a fault in a free copy, and run tests on it."""
    copy = copies.get()
    path = copy / mutant.file
    source = path.read_text()
    chosen = tests_for(mutant, source, tests, seconds)
    started = time.monotonic()
    try:
        path.write_text(mutant.planted(source))
        results = (first_failure(copy, run, started + LONGEST_S) for run in in_runs(chosen))
        noticed = next((result for result in results if result is not None), None)
        if isinstance(noticed, Unfinished):
            path.write_text(source)
            noticed = noticed.test if hangs(copy, noticed) else None
    finally:
        path.write_text(source)
        copies.put(copy)
    took = round(time.monotonic() - started, 1)
    print(f"{mutant.name}: {noticed or 'NOT NOTICED'}, {took} s", flush=True)
    why_not = None if noticed else mutant.survives
    return Verdict(mutant.name, mutant.room, mutant.file, noticed, why_not, took, len(chosen))


def tests_for(mutant: Mutant, source: str, covered: CoverageMap, seconds: dict[str, float]) -> list[str]:
    """Return the tests that run a changed line, in the order in which to run them.

    A line that runs at import, or in a process that a test starts, has no test of its own (and no process
    either, if that was killed). It gets the tests that run most of its file, and the files that start
    processes, those of its own package first.
    """
    changed, covering_tests = mutant.lines(source), covered.get(mutant.file, {})
    changed_lines_of = {
        test: changed & {*lines} for test, lines in covering_tests.items() if test != PROCESSES
    }
    if not is_in_function(source, changed):
        changed_lines_of = {
            test: set() for test in changed_lines_of
        }  # whichever test was the first to import the file
    first_tests = [mutant.first] if mutant.first else []
    quick = sorted(
        (test for test, lines in changed_lines_of.items() if lines), key=lambda test: seconds.get(test, 0.0)
    )
    less_specific = []
    if not quick or changed & {*covering_tests.get(PROCESSES, [])}:
        starts = [
            path for path in all_test_files() if any(word in (ROOT / path).read_text() for word in STARTS)
        ]
        other_tests = sorted(
            (test for test, lines in changed_lines_of.items() if not lines),
            key=lambda test: -len(covering_tests[test]),
        )
        less_specific = sorted(
            [*other_tests, *starts], key=lambda test: Path(file_of(test)).parent.name != mutant.room
        )
    existing_files = {*all_test_files()}
    tests = [
        test
        for test in dict.fromkeys([*first_tests, *quick, *less_specific])
        if file_of(test) in existing_files
    ]
    named = f"test_{Path(mutant.file).stem}.py"
    return sorted(tests, key=lambda test: test not in first_tests and Path(file_of(test)).name != named)[
        :MOST_TESTS
    ]


def is_in_function(source: str, lines: set[int]) -> bool:
    """Return whether one of the lines is in a function's body, and not only run at import."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions_in_source = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return any(
        node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in functions_in_source
        for line in lines
    )


def file_of(test: str) -> str:
    return test.partition("::")[0]


def in_runs(tests: Sequence[str]) -> Iterator[list[str]]:
    """Yield the tests of each run of pytest."""
    files, start = [*dict.fromkeys(map(file_of, tests))], 0
    for count in (*FILES_AT_A_TIME, len(files)):
        chosen = {*files[start : start + count]}
        start += count
        if run := [test for test in tests if file_of(test) in chosen]:
            yield run


def all_test_files() -> list[str]:
    paths = (ROOT / "tests").glob("*/test_*.py")
    return sorted(
        path.relative_to(ROOT).as_posix() for path in paths if path.parent.name not in SEPARATE_FOLDERS
    )


def hangs(copy: Path, stuck: Unfinished) -> bool:
    """Return whether a test that was under way when time was up ends in half the time without the fault."""
    if not stuck.test or stuck.seconds < HANGS_S:
        return False
    return first_failure(copy, [stuck.test], time.monotonic() + stuck.seconds / 2) is None


def first_failure(copy: Path, tests: Sequence[str], deadline: float) -> str | Unfinished | None:
    """Return the first test that fails in the copy until then, or what runs at that time."""
    with tempfile.NamedTemporaryFile("w+") as output:
        Path(output.name + RUNNING).touch()
        process = FORKS.Process(target=run_pytest, args=(copy, tests, output.name))
        process.start()
        assert process.pid is not None  # it has been started
        process.join(max(0.0, deadline - time.monotonic()))
        in_time = process.exitcode is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it leaves behind, too
        process.kill()
        process.join()
        running = Path(output.name + RUNNING)
        test, seconds = running.read_text(), time.time() - running.stat().st_mtime
        running.unlink()
        if not in_time:
            return Unfinished(test, seconds)
        output.seek(0)
        report = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", report, re.MULTILINE)
    if process.exitcode not in (0, 1) or (process.exitcode and failed is None):
        raise RuntimeError(f"pytest ended with status {process.exitcode}:\n{report[-2000:]}")
    return failed[1] if failed else None


def run_pytest(copy: Path, tests: Sequence[str], output: str) -> None:
    """Run tests in this process, which was forked for them, until one fails; exit as pytest does."""
    os.setsid()
    os.chdir(copy)
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(output if descriptor else os.devnull, mode | os.O_APPEND), descriptor)
    os.environ.update(environment(copy))
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_ibpo"]:
        del sys.modules[name]  # this tool's
    import pytest

    os.environ[mutants_plugin.RUNNING] = output + RUNNING
    flags = ["-x", "-q", "-m", "not slow", "-p", "no:xdist", "-p", "mutants_plugin"]
    sys.exit(pytest.main([*flags, *tests]))


def environment(copy: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(copy), str(copy / "tests"), str(ROOT / "tools")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def copied(count: int = COPIES) -> Iterator[list[Path]]:
    """Yield copies of the last commit, with the extension that is built here."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies = [Path(place) / str(number) for number in range(count)]
        for copy in copies:
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(copy)], check=True)
            for built in (ROOT / "megatron_ibpo").glob("*.so"):
                shutil.copy(built, copy / "megatron_ibpo")
        yield copies


def make_map() -> None:
    """Run the fast tests under coverage, and write the map."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as place:
        settings = Path(place) / "settings"
        settings.write_text(SETTINGS.replace("DIRECTORY", place))
        words = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
        words += ["-p", "mutants_plugin", "-n", "logical", "--dist", "loadfile", "-m", "not slow"]
        subprocess.run(
            words,
            cwd=ROOT,
            env={**environment(ROOT), "PYTEST_TIMEOUT": "900", mutants_plugin.SECONDS: place},
            check=False,  # a test may take too long under coverage
        )
        MAP.parent.mkdir(exist_ok=True)
        seconds: dict[str, float] = {}
        for file in Path(place).glob("*.json"):
            seconds |= json.loads(file.read_text())
        for test, test_seconds in [*seconds.items()]:
            file_of_test = test.partition("::")[0]
            seconds[file_of_test] = seconds.get(file_of_test, 0.0) + test_seconds
        MAP.write_text(json.dumps(by_file(settings) | {SECONDS: seconds}))


def by_file(settings: Path) -> CoverageMap:
    """Return the map from the data of all processes."""
    measured = coverage.Coverage(config_file=str(settings))
    measured.combine()
    data = measured.get_data()
    coverage_map: CoverageMap = {}
    for file in data.measured_files():
        lines: dict[str, list[int]] = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                lines.setdefault(context.rpartition("|")[2], []).append(line)
        coverage_map[Path(file).relative_to(ROOT).as_posix()] = lines
    return coverage_map


class Results:
    """The verdicts of a file, with those of a run added one by one. Without a file they stay in memory."""

    def __init__(self, path: Path | None, listed: Sequence[str]) -> None:
        self._path = path
        self._listed = listed
        self._lock = threading.Lock()
        stored_rows = json.loads(path.read_text())["faults"] if path is not None and path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in stored_rows}

    def add(self, verdict: Verdict) -> None:
        """Add a verdict and write the file; faults that are no longer listed are dropped from it."""
        with self._lock:
            self.rows[verdict.name] = asdict(verdict)
            if self._path is None:
                return
            faults = [self.rows[name] for name in self._listed if name in self.rows]
            noticed = sum(row["noticed_by"] is not None for row in faults)
            about = {"machine": machine(), "seconds_each": LONGEST_S, "noticed": noticed, "of": len(faults)}
            self._path.write_text(json.dumps(about | {"faults": faults}, indent=1) + "\n")


def show(verdicts: Sequence[Verdict]) -> None:
    """Print a table."""
    table = Table("fault", "room", "noticed by", "s")
    for verdict in verdicts:
        noticed = verdict.noticed_by or f"not noticed: {verdict.why_not or 'and it should be'}"
        table.add_row(verdict.name, verdict.room, noticed, str(verdict.seconds))
    Console(width=160).print(table)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
