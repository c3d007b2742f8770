"""One directory for the page, read from disk on request: a run, which may still train, or an evaluation.
Nothing outside the directory is read."""

import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_ibpo.basics.text import shown
from megatron_ibpo.basics.user_files import finished_lines, read_json_file
from megatron_ibpo.config import display_name
from megatron_ibpo.data import Tokenizer
from megatron_ibpo.evaluate.stored_samples import RESULTS_FILE
from megatron_ibpo.report.alarms import run_alarms
from megatron_ibpo.report.metrics_log import Columns, is_number, read_row
from megatron_ibpo.report.page.groups import (
    Problem,
    group_of_set,
    group_of_step,
    index_of_set,
    index_of_step,
    matches,
    matching_samples,
    read_problems,
    results_of,
    sample_files,
)
from megatron_ibpo.report.rollout_data import SAMPLES, RecordedStep, load_step, rollout_path
from megatron_ibpo.report.run_dir import (
    CONFIG_FILE,
    METRICS_FILE,
    SKILL_FILE,
    SUMMARY_FILE,
    run_settings,
    run_tokenizer,
)

DRAWN = 400
"""Points of a curve: about its width on a screen."""
LAST = 10
"""Steps over which the last numbers of a run are averaged."""
_CACHE_SIZE = 3
"""Recorded steps, or sets, that are cached in memory."""
_SUMMARY = {"accuracy_start": "accuracy at start", "accuracy_end": "at end", "seconds_total": "seconds"}


T = TypeVar("T")


class NotThere(LookupError):
    """A section, a group or a file does not exist, or is not inside the directory."""


class Source(Protocol):
    """A directory that the page shows. A section is a recorded step or a set, named by a number; its groups
    have no tokens, those come with each group. Raises NotThere for what is not in the directory."""

    name: str

    def version(self) -> str:
        """Return a text that changes whenever any other answer has changed."""

    def overview(self) -> dict[str, Any]:
        """Return everything but curves and samples."""

    def series(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Return kind of row → thinned columns of the steps from `first` to `last`."""

    def section(self, key: int) -> list[dict[str, Any]]: ...
    def group(self, key: int, number: int) -> dict[str, Any]: ...
    def search(self, key: int, text: str) -> list[tuple[int, int]]:
        """Return (group, response) of each response that contains the text."""


def open_source(directory: Path, *, tokenizer: Tokenizer | None = None) -> Source:
    """Open the run or evaluation in a directory.

    Args:
        tokenizer: tokenizer for a run; None: the run's own.

    Raises:
        ValueError: the directory holds neither, or a file in it cannot be read.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; name the directory of a run")
    of_run, of_evaluation = (directory / METRICS_FILE).exists(), (directory / RESULTS_FILE).exists()
    if of_evaluation and not of_run:
        return EvaluationSource(directory)
    if of_run or (directory / CONFIG_FILE).exists():
        return RunSource(directory, tokenizer=tokenizer)
    raise ValueError(
        f"{directory} holds neither the {METRICS_FILE} of a run nor the {RESULTS_FILE} of an evaluation; "
        "name a directory that does"
    )


class RunSource:
    """A run, read as far as it has progressed. Safe to use from several threads."""

    def __init__(self, directory: Path, *, tokenizer: Tokenizer | None = None):
        self.name = directory.resolve().name
        self._directory = directory
        self._tokenizer = tokenizer
        self._settings = run_settings(directory)
        for name in ("advantage-estimator", "hf-checkpoint"):
            if not isinstance(value := self._settings.get(name), str):
                raise ValueError(f"{CONFIG_FILE} of the run: {name} must be text, is {shown(value)}")
        self._log = _Log(directory / METRICS_FILE, directory)
        self._step_of: Callable[[Path, int], RecordedStep] = _cached(load_step)
        # separate, so that curves go on while a large step is read
        self._log_lock, self._steps_lock = threading.Lock(), threading.Lock()

    def version(self) -> str:
        with self._log_lock:
            self._log.read_on()
        summary = self._directory / SUMMARY_FILE
        changed = summary.stat().st_mtime_ns if summary.exists() else 0
        return f"{self._log.version}-{len(self.recorded())}-{changed}"

    def overview(self) -> dict[str, Any]:
        with self._log_lock:
            self._log.read_on()
            steps = self._log.columns["step"]
            size = self._settings.get("rollout-batch-size")
            groups_per_step = size if type(size) is int and size > 0 else None
            alarms = run_alarms(steps, groups_per_step=groups_per_step)
            last = self._last_numbers()
        model = display_name(Path(self._settings["hf-checkpoint"]))
        facts, skill = self._end(), self._object(SKILL_FILE, "premise", "it")
        return {
            "name": self.name,
            "kind": "run",
            "title": f"{self._settings['advantage-estimator']}, {model}",
            "facts": facts if skill is None else [*facts, skill["premise"]],
            "steps": max(steps.steps, default=0),
            "planned": self._settings.get("num-rollout"),
            "alarms": [asdict(alarm) for alarm in alarms],
            "sections": [{"key": step, "label": f"step {step}"} for step in self.recorded()],
            "settings": {
                key: value if isinstance(value, str | int | float | bool | None) else str(value)
                for key, value in self._settings.items()
            },
            "last": last,
            "sets": {},
        }

    def series(self, first: int | None, last: int | None) -> dict[str, Any]:
        with self._log_lock:
            self._log.read_on()
            return {kind: rows.thinned(first, last, DRAWN) for kind, rows in self._log.columns.items()}

    def section(self, key: int) -> list[dict[str, Any]]:
        return self._content(key, lambda step: index_of_step(step.groups))

    def group(self, key: int, number: int) -> dict[str, Any]:
        def content(step: RecordedStep) -> dict[str, Any]:
            if not 0 <= number < len(step.groups):
                raise NotThere(f"step {key} has {len(step.groups)} groups")
            return group_of_step(number, step, self._reader())

        return self._content(key, content)

    def search(self, key: int, text: str) -> list[tuple[int, int]]:
        return self._content(key, lambda step: matches(step.groups, text, self._reader()))

    def recorded(self) -> list[int]:
        names = (path.stem.removeprefix("step_") for path in self._records().glob("step_*.json"))
        return sorted(int(step) for step in names if step.isascii() and step.isdigit())

    def _records(self) -> Path:
        """Return the folder of recorded steps: all of them, if they were saved, otherwise a few."""
        every = self._directory / "rollouts"
        return every if every.is_dir() else self._directory / SAMPLES

    def _path(self, key: int) -> Path:
        return _inside(self._directory, rollout_path(self._records(), key))

    def _content(self, key: int, content: Callable[[RecordedStep], Any]) -> Any:
        """Return the content of a recorded step; errors in its records name their file."""
        path = self._path(key)
        with self._steps_lock:
            step = self._step_of(path, path.stat().st_mtime_ns)
            try:
                return content(step)
            except (ValueError, TypeError, AttributeError, OverflowError, LookupError) as error:
                if isinstance(error, NotThere):
                    raise
                raise ValueError(
                    f"recorded rollouts {path}: a record cannot be shown: {shown(error)}"
                ) from error

    def _reader(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = run_tokenizer(self._directory)
        return self._tokenizer

    def _last_numbers(self) -> dict[str, float]:
        """Return means over the last steps, and the last evaluation's measures."""
        numbers: dict[str, float] = {}
        for kind, count, prefix in (("evaluation", 1, "evaluation/"), ("step", LAST, "")):
            columns = self._log.columns[kind]
            for name in columns.names:
                if (value := columns.last(name, count)) is not None:
                    numbers[prefix + name] = float(f"{value:.5g}")
        return numbers

    def _object(self, name: str, key: str, description: str) -> dict[str, Any] | None:
        """Return the JSON object in a file, which has a text as `key`; None without the file."""
        path = self._directory / name
        if not path.exists():
            return None
        path = _inside(self._directory, path)
        try:
            content = read_json_file(path)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get(key), str):
            raise ValueError(f"{path}: {description} must hold an object with a {key}")
        return content

    def _end(self) -> list[str]:
        summary = self._object(SUMMARY_FILE, "status", "no summary of a run: it")
        if summary is None:
            return ["not finished"]
        values = {name: summary.get(key) for key, name in _SUMMARY.items()}
        if strange := [name for name, value in values.items() if not (value is None or is_number(value))]:
            raise ValueError(f"{self._directory / SUMMARY_FILE}: {strange[0]} must be a number")
        return [
            summary["status"],
            *(f"{name} {value:.4g}" for name, value in values.items() if value is not None),
        ]


class EvaluationSource:
    """An evaluation's directory: results.json, and SET.samples.jsonl for each set."""

    def __init__(self, directory: Path):
        self.name = directory.resolve().name
        self._directory = directory
        self._problems_of: Callable[[Path, int], list[Problem]] = _cached(read_problems)
        self._lock = threading.Lock()

    def version(self) -> str:
        files = [self._directory / RESULTS_FILE, *sample_files(self._directory).values()]
        return "-".join(f"{path.stat().st_mtime_ns}" for path in files if path.exists())

    def overview(self) -> dict[str, Any]:
        _inside(self._directory, self._directory / RESULTS_FILE)
        status, policy, sets = results_of(self._directory)
        return {
            "name": self.name,
            "kind": "evaluation",
            "title": f"evaluation of {Path(policy).name}" if policy else "evaluation",
            "facts": [status] if status else [],
            "steps": 0,
            "planned": None,
            "alarms": [],
            "sections": [
                {"key": number, "label": name} for number, name in enumerate(sample_files(self._directory))
            ],
            "settings": {},
            "last": {},
            "sets": sets,
        }

    def series(self, first: int | None, last: int | None) -> dict[str, Any]:
        return {}

    def section(self, key: int) -> list[dict[str, Any]]:
        return index_of_set(self._read(key)[1])

    def group(self, key: int, number: int) -> dict[str, Any]:
        path, problems = self._read(key)
        if not 0 <= number < len(problems):
            raise NotThere(f"{path.name} has {len(problems)} problems")
        return group_of_set(path, problems[number])

    def search(self, key: int, text: str) -> list[tuple[int, int]]:
        return matching_samples(*self._read(key), text)

    def _read(self, key: int) -> tuple[Path, list[Problem]]:
        files = list(sample_files(self._directory).values())
        if not 0 <= key < len(files):
            raise NotThere(f"the evaluation has {len(files)} sets with samples")
        path = _inside(self._directory, files[key])
        with self._lock:
            return path, self._problems_of(path, path.stat().st_mtime_ns)


class _Log:
    """A growing metrics.jsonl; each reading starts where the last one ended."""

    def __init__(self, path: Path, directory: Path):
        self._path, self._directory = path, directory
        self._file: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self.columns = {"evaluation": Columns(), "step": Columns()}
        self._offset, self._lines = 0, 0

    @property
    def version(self) -> str:
        return f"{self._file}-{self._offset}"

    def read_on(self) -> None:
        """Read the new complete lines. A log that was replaced, as by a resumed run, is read from its start.
        Raises ValueError if a line is not a row."""
        if not self._path.exists():
            return
        with _inside(self._directory, self._path).open("rb") as file:
            status = Path(file.name).stat()
            identity = (status.st_dev, status.st_ino)
            if identity != self._file or status.st_size < self._offset:
                self._file = identity
                self._begin()
            file.seek(self._offset)
            for line in finished_lines(file, self._path):
                row = read_row(line, f"{self._path}, line {self._lines + 1}")
                self.columns[row["kind"]].add(row)
                self._offset += len(line)
                self._lines += 1


def _cached(read: Callable[[Path], T]) -> Callable[[Path, int], T]:
    """Return a reader of files that caches the last few, each by its path and the time of its last change."""
    return lru_cache(_CACHE_SIZE)(lambda path, changed: read(path))


def _inside(directory: Path, path: Path) -> Path:
    """Return the path, if it is a file that is inside the directory even after following links."""
    if not path.is_file():
        raise NotThere(f"{path.name} is not there")
    if not path.resolve().is_relative_to(directory.resolve()):
        raise NotThere(f"{path} leads out of {directory}, and nothing outside is shown")
    return path
