"""A predicted step as spans of time, for a picture."""

from megatron_ibpo.plan.prediction import Setting
from megatron_ibpo.plan.step_time import StepTimes
from megatron_ibpo.report.step_picture import Span

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
