"""The rows of a metrics log as named columns, thinned so that they can be drawn."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

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
        """Add a row of metrics.jsonl."""
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

    def known(self, *names: str) -> tuple[Array, ...]:
        """Return (steps, values of each name) of the rows that have all of them."""
        columns = np.array([self._values.get(name, [np.nan] * len(self.steps)) for name in names])
        present = ~np.isnan(columns).any(axis=0)
        return np.array(self.steps, float)[present], *columns[:, present]

    def last(self, name: str, most: int) -> float | None:
        """Return the mean of the column's last `most` known values; None if there are none."""
        _, values = self.known(name)
        return float(values[-most:].mean()) if values.size else None

    def thinned(self, first: int | None, last: int | None, most: int) -> dict[str, Any]:
        """Return the rows from step `first` to `last` in at most `most` buckets of equal size; the newest row
        has its own.

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
        size = max(1, -(-len(steps) // most))
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
