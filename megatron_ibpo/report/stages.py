"""Seconds by stage of the start and of the loop, and the error of a prediction of them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

FREE_STAGES = frozenset(
    {"start", "evaluate", "save", "report", "record", "check weights", "gradient meter", "operator skill"}
)
"""Stages of the loop that observe and do not train."""


class Stages:
    """A meter of the seconds spent in each stage.

        with stages("sample"):
            ...
        seconds = stages.take()  # {"sample": 1.2}

    The seconds of an inner stage are subtracted from the outer one, so that the sum never counts a second
    twice. A stage that raises is counted all the same.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            own_seconds = elapsed - self._inner.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + own_seconds
            if self._inner:
                self._inner[-1] += elapsed

    def take(self) -> dict[str, float]:
        """Return the seconds by stage since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


SAMPLING, TRAINING, WEIGHTS, STEP = "sampling", "training", "weights", "step"
_STAGES = {SAMPLING: ("sample",), TRAINING: ("log-probs", "train"), WEIGHTS: ("sync",)}
"""Compared part → stages of the loop. A step is all stages that train (`report.stages.FREE_STAGES`)."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Forecast:
    """A prediction of a step, or the reason why there is none."""

    seconds: Mapping[str, float] | None
    """Seconds of a step and of its parts, by the names here."""
    text: str
    """The same as text for the user."""


def prediction_error(predicted: Mapping[str, float], rows: Sequence[Row]) -> dict[str, float] | None:
    """Return predicted / measured - 1, for a step and for each of its parts that took time. Measured are
    medians over all steps of a metrics log but the first, which warms up; None if there are no others."""
    steps = [row["seconds"] for row in rows if row["kind"] == "step" and row.get("seconds")][1:]
    if not steps:
        return None
    measured = {
        name: median(sum(seconds.get(stage, 0.0) for stage in stages) for seconds in steps)
        for name, stages in _STAGES.items()
    }
    measured[STEP] = median(
        sum(value for stage, value in seconds.items() if stage not in FREE_STAGES) for seconds in steps
    )
    return {name: predicted[name] / value - 1 for name, value in measured.items() if value > 0}


def error_line(predicted: Mapping[str, float], errors: Mapping[str, float]) -> str:
    """Return the errors as text for the user."""
    parts = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items() if name != STEP)
    return (
        f"A step was predicted to take {predicted[STEP]:.2f} s, an error of {errors[STEP]:+.0%} against the "
        f"median step ({parts})."
    )


class StartLines:
    """Prints a line as each stage of a start begins, and at the end the seconds of every stage; at once also
    where the output is a file."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._stages: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> None:
        """Show that a stage begins; the one before it has ended."""
        now = time.monotonic()
        self._stages.append((stage, now))
        print(f"start, {now - self._began:.1f} s: {stage} …", flush=True)

    def end(self) -> None:
        """Show the seconds of all stages."""
        now = time.monotonic()
        ends = [*(began for _, began in self._stages[1:]), now]
        parts = (f"{stage} {end - began:.1f}" for (stage, began), end in zip(self._stages, ends, strict=True))
        print(f"started in {now - self._began:.1f} s: {', '.join(parts)}", flush=True)
