"""A predicted step as spans of time, and their picture: a lane per process, a bar per period of work."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from megatron_ibpo.plan.prediction import Setting
from megatron_ibpo.plan.step_time import StepTimes
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


ENGINES, CORRECTIONS = "engines", "corrections"
TRAINER, OPTIMIZER, WEIGHTS = "trainer", "optimizer", "weight update"
MOVES, OTHER = "moves", "other"
LANES = (ENGINES, CORRECTIONS, MOVES, TRAINER, OPTIMIZER, WEIGHTS, OTHER)


def timeline(setting: Setting) -> list[Span]:
    """Return the spans of one step in the steady state, without empty ones. Raises as `Setting.times`.

    With their own GPUs and staleness, engines write for a later step while trainers train.
    """
    times = setting.times()
    if setting.colocated or not setting.task.staleness:
        spans = _sampling(times)
        spans += _training(times, spans[-1].end)
        spans += _closing(times, spans[-1].end)
    else:
        end = times.total - times.weights - times.other
        spans = [*_sampling(times), *_training(times, 0.0), *_closing(times, end)]
    return [span for span in spans if span.end > span.begin]


def _sampling(times: StepTimes) -> list[Span]:
    """Return the spans of sampling. Prompts are drawn before responses, though engines read them in between.
    Corrections of the first groups start while the last responses are written."""
    prompts, written = times.sampled.prompts, times.sampling
    end = written + times.corrections
    return [
        Span(ENGINES, "prompts", 0.0, prompts),
        Span(ENGINES, "responses", prompts, written),
        Span(CORRECTIONS, "corrections", end - times.corrected.seconds, end),
    ]


def _training(times: StepTimes, begin: float) -> list[Span]:
    """Return the spans of training. They include half of colocation's moves; `_closing` has the other
    half."""
    optimizer = times.passes.optimizer
    return _in_turn(
        begin,
        (MOVES, "engines out, trainers in", times.switching / 2),
        (TRAINER, "log-probs", times.log_probs),
        (TRAINER, "forward and backward", times.update - optimizer),
        (OPTIMIZER, "optimizer", optimizer),
    )


def _closing(times: StepTimes, begin: float) -> list[Span]:
    return _in_turn(
        begin,
        (WEIGHTS, "weight update", times.weights),
        (MOVES, "trainers out, engines in", times.switching / 2),
        (OTHER, "other", times.other),
    )


def _in_turn(begin: float, *work: tuple[str, str, float]) -> list[Span]:
    """Return spans of (lane, name, seconds), one after the other."""
    spans = []
    for lane, name, seconds in work:
        spans.append(Span(lane, name, begin, begin + seconds))
        begin += seconds
    return spans
