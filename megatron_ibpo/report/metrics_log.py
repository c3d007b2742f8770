"""The log of a run's metrics: metrics.jsonl, TensorBoard, Weights & Biases, trackio; the metrics of each
source in a mixture; the rows of a log as named columns, thinned so that they can be drawn; and the held-out
problems that a policy solved, kept for each evaluation, so that runs can be compared by problem."""

import importlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import Group
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.user_files import append_record, open_records, record_lines
from megatron_ibpo.evaluate import EvalSample, SetEvaluation
from megatron_ibpo.report.run_dir import METRICS_FILE, jsonable, require_room, write_whole

Kind = Literal["step", "evaluation"]

ROOM_BYTES = 1024**2
"""Bytes that must be free before a row is written. This protects TensorBoard too: its thread dies when the
disk fills up during a write."""

log = logging.getLogger(__name__)


class MetricsLog:
    """The log of metrics, with one row per step and one per evaluation, flushed at once.

    A row is `{"kind", "step", name: value, …, "seconds": {stage: seconds}}`. `step` is the number of steps
    completed: 1 for the first step's row, 0 for the evaluation before it. A value that is not finite is
    written as null, since JSON cannot represent it.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        completed_steps: int = 0,
        trackers: Sequence[str] = (),
        tracked_config: dict[str, Any] | None = None,
    ):
        """Continue the log of `run_dir` after `completed_steps`; later rows, of steps that will be repeated,
        are removed.

        Args:
            trackers: packages with wandb's interface (wandb, trackio) to log to as well.
            tracked_config: the run's configuration, for them.
        """
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and for the driver only

        self._dir = run_dir
        path = run_dir / METRICS_FILE
        stored_rows = read_rows(path) if path.exists() else []
        self.rows = [row for row in stored_rows if row["step"] <= completed_steps]
        self._tracked: list[Any] = [_tracked_run(name, run_dir, tracked_config) for name in trackers]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = open_records(path)
        self._tensorboard: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=completed_steps + 1)

    def append(self, kind: Kind, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """Write a row to all logs. If OSError is raised, no log has it, and it may be appended again."""
        rounded = {name: round(value, 4) for name, value in seconds.items()}
        row = {"kind": kind, "step": step, **jsonable(metrics), "seconds": rounded}
        require_room(self._dir, ROOM_BYTES)
        append_record(self._file, row)
        self.rows.append(row)
        prefix = "evaluation/" if kind == "evaluation" else ""
        scalars = {f"{prefix}{name}": value for name, value in metrics.items()}
        scalars |= {f"seconds/{name}": value for name, value in seconds.items()}
        if self._tensorboard is not None:
            self._draw(scalars, step)
        for tracked in self._tracked:
            tracked.log(scalars, step=step)

    def _draw(self, scalars: dict[str, float], step: int) -> None:
        """Write scalars to TensorBoard. Its writer cannot continue after an error: it keeps what it has, and
        the rows hold everything."""
        try:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        except OSError as error:
            log.warning("TensorBoard logging has stopped: %s", error)
            self._tensorboard = None

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        for tracked in self._tracked:
            tracked.finish()


def _tracked_run(tracker: str, run_dir: Path, config: dict[str, Any] | None) -> Any:
    """Return a run of wandb or trackio, with the name of the run's directory."""
    directory = {"dir": str(run_dir)} if tracker == "wandb" else {}  # trackio keeps all runs in $TRACKIO_DIR
    module = importlib.import_module(tracker)
    return module.init(project="megatron_ibpo", name=run_dir.name, config=config, **directory)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without an unfinished one at the end. Raises ValueError if a line
    is not JSON, or not a row."""
    return [read_row(line, location) for location, line in record_lines(path)]


def read_row(line: bytes, location: str) -> dict[str, Any]:
    """Return the row on a line of a metrics.jsonl. Raises ValueError if the line is not JSON, or not a
    row."""
    try:
        row = read_json(line)
    except ValueError as error:
        raise ValueError(f"{location}: not JSON: {error}") from error
    if not _is_row(row):
        raise ValueError(f"{location}: not a row of a metrics log, which has a kind, a step and numbers")
    return row


def _is_row(row: Any) -> bool:
    """Return whether this is a row that `MetricsLog` writes."""
    if not isinstance(row, dict) or row.get("kind") not in list(get_args(Kind)):
        return False
    if type(row.get("step")) is not int or not is_number(row["step"]):
        return False
    seconds = row.get("seconds", {})
    if not isinstance(seconds, dict):
        return False
    values = [value for name, value in row.items() if name not in ("kind", "seconds")] + [*seconds.values()]
    return all(value is None or is_number(value) for value in values)


def is_number(value: Any) -> bool:
    """Return whether a value can be drawn and printed: JSON's integers may exceed any float."""
    return isinstance(value, int | float) and abs(value) < 1e300


Array = npt.NDArray[np.float64]


class Columns:
    """Rows of one kind as growing columns. A value that a row lacks is NaN.

    The seconds of a stage are the column `seconds/STAGE`.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()):
        self.steps: list[int] = []
        self._values: dict[str, list[float]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        values = {name: value for name, value in row.items() if name not in ("kind", "step", "seconds")}
        values |= {f"seconds/{stage}": value for stage, value in row.get("seconds", {}).items()}
        for name in values:
            if name not in self._values:
                self._values[name] = [np.nan] * len(self.steps)
        self.steps.append(row["step"])
        for name, column in self._values.items():
            value = values.get(name)
            column.append(np.nan if value is None else float(value))

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def values(self, *names: str) -> tuple[Array, ...]:
        """Return (steps, values of each name) of the rows that have all of them."""
        columns = np.array([self._values.get(name, [np.nan] * len(self.steps)) for name in names])
        present = ~np.isnan(columns).any(axis=0)
        return np.array(self.steps, float)[present], *columns[:, present]

    def last(self, name: str, count: int) -> float | None:
        """Return the mean of the column's last `count` known values; None if there are none."""
        _, values = self.values(name)
        return float(values[-count:].mean()) if values.size else None

    def thinned(self, first: int | None, last: int | None, max_buckets: int) -> dict[str, Any]:
        """Return the rows from step `first` to `last` in at most `max_buckets` buckets of equal size; the
        newest row has its own.

        Returns:
            "first" and "last": steps of each bucket. "metrics": name → "mean" and, if a bucket has several
            rows, "low" and "high", by bucket; None if no row has a value. Numbers have 5 digits.
        """
        steps = np.array(self.steps, float)  # a damaged log may hold a step beyond any integer of numpy
        chosen = np.ones(len(steps), bool)
        if first is not None:
            chosen &= steps >= first
        if last is not None:
            chosen &= steps <= last
        steps = steps[chosen]
        size = max(1, -(-len(steps) // max_buckets))
        starts = np.arange(0, len(steps), size)
        if size > 1 and starts[-1] < len(steps) - 1:
            starts = np.append(starts, len(steps) - 1)  # the newest row is shown as it is
        ends = np.append(starts[1:], len(steps))[: len(starts)] - 1
        metrics = {}
        for name, column in self._values.items():
            values = np.array(column)[chosen]
            if not np.isnan(values).all():
                metrics[name] = _buckets(values, starts, size)
        first_steps, last_steps = ([int(step) for step in steps[rows]] for rows in (starts, ends))
        return {"first": first_steps, "last": last_steps, "metrics": metrics}


def _buckets(values: Array, starts: npt.NDArray[np.int64], size: int) -> dict[str, list[float | None]]:
    if size == 1:
        return {"mean": _short(values)}
    absent = np.isnan(values)
    count = np.add.reduceat(~absent, starts, dtype=int)
    total = np.add.reduceat(np.where(absent, 0.0, values), starts)
    mean = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
    return {
        "mean": _short(mean),
        "low": _short(np.fmin.reduceat(values, starts)),
        "high": _short(np.fmax.reduceat(values, starts)),
    }


def _short(values: Array) -> list[float | None]:
    return [None if value != value else float(f"{value:.5g}") for value in values.tolist()]


def metrics_by_task(groups: Sequence[Group]) -> dict[str, float]:
    """Return `prompts/TASK` and `accuracy/TASK` (share of scored responses that are right) for every task."""
    by_task: dict[str, list[Group]] = {}
    for group in groups:
        by_task.setdefault(group.prompt.task, []).append(group)
    metrics: dict[str, float] = {}
    for task, task_groups in sorted(by_task.items()):
        scored = [
            response.correct
            for group in task_groups
            for response in group.responses
            if response.reward is not None
        ]
        metrics[f"prompts/{task}"] = float(len(task_groups))
        if scored:
            metrics[f"accuracy/{task}"] = sum(scored) / len(scored)
    return metrics


def outcomes_path(run_dir: Path, step: int, name: str = "") -> Path:
    """Return the path of the outcomes of the evaluation after `step` steps.

    Args:
        name: the set's name, if sets have names.
    """
    return run_dir / "evaluations" / name / f"step_{step:06d}.json"


def save_outcomes(run_dir: Path, step: int, evaluated: Sequence[SetEvaluation]) -> None:
    """Write the outcomes of every set."""
    (run_dir / "evaluations").mkdir(exist_ok=True)
    for set_evaluation in evaluated:
        path = outcomes_path(run_dir, step, set_evaluation.set.name if set_evaluation.set.is_named else "")
        write_whole(path, json.dumps({"step": step, "problems": _problems(set_evaluation.samples)}) + "\n")


def _problems(samples: Sequence[EvalSample]) -> dict[str, dict[str, list[int | None]]]:
    """Return 1 (correct), 0 (wrong) or null (the verifier failed) for each response, by problem; sampled and
    greedy ones are separate."""
    problems: dict[str, dict[str, list[int | None]]] = {}
    for sample in samples:
        outcomes = problems.setdefault(str(sample.prompt_index), {"sampled": [], "greedy": []})
        if sample.kind != "correction":
            outcomes[sample.kind].append(None if sample.reward is None else int(sample.correct))
    return problems


def load_outcomes(path: Path) -> dict[int, float]:
    """Return problem → share of its sampled responses that were correct; NaN if the verifier failed on all.
    Raises ValueError if the file is missing or is not what `save_outcomes` writes."""
    try:
        problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
        return {int(index): _share(outcomes["sampled"]) for index, outcomes in problems.items()}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: holds no outcomes of an evaluation: {error!r:.200}") from error


def _share(outcomes: Sequence[int | None]) -> float:
    scored: npt.NDArray[np.float64] = np.array([outcome for outcome in outcomes if outcome is not None])
    return float(scored.mean()) if scored.size else float("nan")
