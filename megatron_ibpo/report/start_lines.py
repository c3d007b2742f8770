"""The lines of a start: minutes may pass before a run has a report of its own."""

import time
from collections.abc import Callable


class StartLines:
    """Shows a line as each stage of a start begins, and at the end the seconds of every stage."""

    def __init__(self, show: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
        """Begin to count seconds.

        Args:
            show: shows a line, at once also where the output is a file.
        """
        self._show = show
        self._began = time.monotonic()
        self._stages: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> None:
        """Show that a stage begins; the one before it has ended."""
        now = time.monotonic()
        self._stages.append((stage, now))
        self._show(f"start, {now - self._began:.1f} s: {stage} …")

    def end(self) -> None:
        """Show the seconds of all stages."""
        now = time.monotonic()
        ends = [*(began for _, began in self._stages[1:]), now]
        parts = (f"{stage} {end - began:.1f}" for (stage, began), end in zip(self._stages, ends, strict=True))
        self._show(f"started in {now - self._began:.1f} s: {', '.join(parts)}")
