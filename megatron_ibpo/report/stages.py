"""Seconds by stage of the loop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
            own = elapsed - self._inner.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + own
            if self._inner:
                self._inner[-1] += elapsed

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by stage since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
