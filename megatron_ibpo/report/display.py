"""Display of a run on the terminal: the table of sizes, and the progress of the steps."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_ibpo.basics.text import counted

METRIC_LABELS = {
    "reward": "reward",
    "accuracy": "accuracy",
    "correction_success": "corrected",
    "loss": "loss",
    "clip_fraction": "clipped",
    "logprob_diff_abs_mean": "|Δ log-prob|",
}
"""Metrics of the live display → their labels there."""


@dataclass(frozen=True)
class Size:
    """One line of the table of sizes."""

    name: str
    value: str | int
    meaning: str = ""


def plain_table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table without edges, with these columns of text and then these of numbers."""
    table = Table(*texts, show_edge=False, pad_edge=False)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def sizes_table(sizes: Iterable[Size]) -> Table:
    """Return a table with the named sizes of a run, one per line."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("size", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("what it is", style="dim")
    for size in sizes:
        value = f"{size.value:,}" if isinstance(size.value, int) else size.value
        table.add_row(size.name, value, size.meaning)
    return table


def open_console() -> Console:
    """Open the terminal as it is; a file or pipe gets lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


class ProgressDisplay:
    """A live panel on a terminal; one plain line per step on any other output."""

    def __init__(self, num_steps: int, *, completed_steps: int = 0, console: Console | None = None):
        self.console = console or open_console()
        self._num_steps = num_steps
        self._first_step = self._step = completed_steps
        self._start = time.monotonic()
        self._live: Live | None = None

    def print(self, content: object) -> None:
        """Print above the live panel."""
        self.console.print(content, highlight=False, markup=False, soft_wrap=isinstance(content, str))

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        if self._step == self._first_step:
            self._start = time.monotonic() - sum(seconds.values())  # start-up is not part of the estimate
        self._step = step
        if not self.console.is_terminal:
            self.print(self._line(metrics, seconds))
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(self._panel(metrics, seconds), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _eta_seconds(self) -> float:
        per_step = (time.monotonic() - self._start) / max(1, self._step - self._first_step)
        return per_step * (self._num_steps - self._step)

    def _line(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> str:
        parts = [f"step {self._step}/{self._num_steps}"]
        parts += [f"{label} {metrics[name]:.4g}" for name, label in METRIC_LABELS.items() if name in metrics]
        parts += _sampling(metrics)
        parts.append(f"{sum(seconds.values()):.1f} s ({_stages(seconds)})")
        parts.append(f"eta {_clock(self._eta_seconds())}")
        return "  ".join(parts)

    def _panel(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> Panel:
        values = Table.grid(padding=(0, 3))
        names = [name for name in METRIC_LABELS if name in metrics]
        for _ in names:
            values.add_column(justify="right")
        values.add_row(*(Text(METRIC_LABELS[name], style="dim") for name in names))
        values.add_row(*(f"{metrics[name]:.4g}" for name in names))
        sampling = Text("  ".join(_sampling(metrics)))
        times = Text(f"{sum(seconds.values()):.1f} s per step: {_stages(seconds)}", style="dim")
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=self._num_steps, completed=self._step))
        title = f"step {self._step} of {self._num_steps}, {_clock(self._eta_seconds())} to go"
        return Panel(
            Group(bar, values, *([sampling] if sampling else []), times), title=title, title_align="left"
        )


def _sampling(metrics: Mapping[str, float]) -> list[str]:
    """Return the number of live engines and, if sampling runs ahead, the age of the batch and the work under
    way."""
    parts = []
    if "engines" in metrics:
        parts.append(f"engines {metrics['engines_alive']:.0f}/{metrics['engines']:.0f}")
    if "staleness_max" in metrics:
        parts.append(f"staleness {metrics['staleness_mean']:.2g}, at most {metrics['staleness_max']:.0f}")
        in_flight = f"in flight {counted(round(metrics['samples_in_flight']), 'sample')}"
        parts.append(f"{in_flight} of {counted(round(metrics['groups_in_flight']), 'group')}")
        parts.append(f"buffer {counted(round(metrics['groups_buffered']), 'group')}")
    return parts


def _stages(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)


def _clock(seconds: float) -> str:
    minutes, full_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{full_seconds:02d}" if hours else f"{minutes}:{full_seconds:02d}"
