"""A picture of one step: a lane per process, a bar per period of work."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from megatron_ibpo.report.run_curves import STYLE
from megatron_ibpo.report.run_dir import whole


@dataclass(frozen=True)
class Span:
    """A period of work."""

    lane: str
    name: str
    begin: float
    """Start in seconds since the step began."""
    end: float


def plot_step(spans: Sequence[Span], lanes: Sequence[str], path: Path, *, title: str) -> None:
    """Draw the lanes from top to bottom, as a PNG. One without spans stays empty."""
    names = list(dict.fromkeys(span.name for span in spans))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 1.4 + 0.4 * len(lanes)), dpi=120, layout="constrained")
        figure.suptitle(title)
        axes = figure.add_subplot()
        for number, name in enumerate(names):
            own = [span for span in spans if span.name == name]
            axes.barh(
                [lanes.index(span.lane) for span in own],
                [span.end - span.begin for span in own],
                left=[span.begin for span in own],
                height=0.7,
                color=f"C{number}",
                label=name,
            )
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlabel("seconds")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as unfinished:
            figure.savefig(unfinished, format="png")
