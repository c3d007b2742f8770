"""The log of a run's metrics: metrics.jsonl, TensorBoard, Weights & Biases, trackio."""

import importlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_ibpo.basics.record_lines import append_record, open_records, record_lines
from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.report.disk import require_room
from megatron_ibpo.report.run_dir import METRICS_FILE, jsonable, write_whole

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
        before = read_rows(path) if path.exists() else []
        self.rows = [row for row in before if row["step"] <= completed_steps]
        self._tracked: list[Any] = [_tracked_run(name, run_dir, tracked_config) for name in trackers]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = open_records(path)
        self._tensorboard: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=completed_steps + 1)

    def append(self, kind: Kind, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """Write a row to all logs. If OSError is raised, the row is in none of them and may be appended
        again."""
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
    own = {"dir": str(run_dir)} if tracker == "wandb" else {}  # trackio keeps all runs in $TRACKIO_DIR
    module = importlib.import_module(tracker)
    return module.init(project="megatron_ibpo", name=run_dir.name, config=config, **own)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without an unfinished one at the end.

    Raises:
        ValueError: a line is not JSON, or not a row.
    """
    return [read_row(line, where) for where, line in record_lines(path)]


def read_row(line: bytes, where: str) -> dict[str, Any]:
    """Return the row on a line of a metrics.jsonl.

    Raises:
        ValueError: the line is not JSON, or not a row.
    """
    try:
        row = read_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not _is_row(row):
        raise ValueError(f"{where}: not a row of a metrics log, which has a kind, a step and numbers")
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
