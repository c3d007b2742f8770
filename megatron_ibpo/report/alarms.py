"""Rules for alarms during a run, and for what stops it. Each rule is defined once: some are shown above the
progress of a step, all of them on the page of a run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import Config, named_values
from megatron_ibpo.engines.registry import sampling_precision
from megatron_ibpo.report.metrics_log import Array, Columns

REWARD_ERROR_SHARE = 0.05
"""Share of verifier failures from which an alarm is raised: an occasional time-out is normal, one in twenty
is not."""
TRUNCATED_SHARE = 0.9
"""Share of responses cut off at the length limit from which an alarm is raised: hardly any can be correct."""
WINDOW = 10
"""Steps over which the rules below average: one step alone says little of a trend."""
ENTROPY_SHARE = 0.1
"""Entropy has collapsed below this share of its value in the first steps. Half or a third is normal in
learning; at a tenth all responses of a group are nearly the same."""
LENGTH_FACTOR = 2.0
"""Factor by which responses have become longer, or shorter, than in the first steps if they drift."""
MISMATCH_BOUND = 0.01
"""Nats per token, k3 estimate, that trainer and engine may differ by. k3 is about half the square of the
difference of log-probs, so a typical token's probability is off by 14 %. Sound kernels stay a hundred times
below."""
ROUNDING_BOUNDS = {"float32": 1e-3, "bfloat16": 0.03}
"""Precision → mean |Δ log-prob| per token that a run may have. Measured on CPUs: float32 about 1e-5 in every
family; bfloat16 .001 to .003 on the default run, and .03 to .15 where SmolLM2 is trained in float32 and
sampled in bfloat16 (docs/models.md)."""
SATURATED_ACCURACY = 0.98
"""Share of right responses (or, at one minus it, wrong ones) that leaves hardly anything to learn from."""
DEAD_GROUPS_SHARE = 0.9
"""Share of groups with equal rewards, which give no gradient. A good policy has many; at nine of ten most
sampling is lost."""
LEAKAGE_SHARE = 0.2
"""Share of corrections that only copy a reference's answer. A sound correction of a response with only a
wrong final answer looks the same, but that explains one in forty (the default run), not one in five."""


class RewardErrorRateError(RuntimeError):
    """The verifier failed on more of a step than --max-reward-error-rate allows."""


@dataclass(frozen=True)
class Alarm:
    """Consecutive steps over which a rule held."""

    name: str
    metric: str
    """Name of the metric that shows it best."""
    since: int
    """Its first step."""
    until: int | None
    """Its last step; None when it held at the last step that has the metric."""
    reason: str
    """Reason, with the numbers of its last step."""


class _Trend(NamedTuple):
    """A rule about the mean of a metric over WINDOW steps, and that of the first WINDOW steps."""

    name: str
    metric: str
    holds: Callable[[Array, float], npt.NDArray[np.bool_]]
    reason: Callable[[float, float], str]


_TRENDS = (
    _Trend(
        "entropy collapse",
        "entropy",
        lambda recent, start: recent < ENTROPY_SHARE * start,
        lambda recent, start: (
            f"{recent:.3g} nats per token over the last {WINDOW} steps, {recent / start:.0%} of the "
            f"{start:.3g} of the first {WINDOW}: the responses of a group become alike"
        ),
    ),
    _Trend(
        "length drift",
        "response_length",
        lambda recent, start: (
            ((recent >= LENGTH_FACTOR * start) | (recent <= start / LENGTH_FACTOR)) & (start > 0)
        ),
        lambda recent, start: (
            f"{recent:,.0f} tokens per response over the last {WINDOW} steps, {recent / start:.2g} times the "
            f"{start:,.0f} of the first {WINDOW}"
        ),
    ),
    _Trend(
        "trainer and engine differ",
        "logprob_diff_k3",
        lambda recent, _: recent > MISMATCH_BOUND,
        lambda recent, _: (
            f"log-probs of trainer and engine are {recent:.3g} nats per token apart (k3) over the last "
            f"{WINDOW} steps, more than {MISMATCH_BOUND:g}: the engine does not sample from the policy that "
            "is trained"
        ),
    ),
    _Trend(
        "reward saturates",
        "accuracy",
        lambda recent, _: (recent >= SATURATED_ACCURACY) | (recent <= 1 - SATURATED_ACCURACY),
        lambda recent, _: (
            f"{recent:.1%} of the responses of the last {WINDOW} steps are right: the problems are too "
            f"{'easy' if recent > 0.5 else 'hard'} to learn from"
        ),
    ),
    _Trend(
        "reference leakage",
        "reference_leakage_rate",
        lambda recent, _: recent >= LEAKAGE_SHARE,
        lambda recent, _: (
            f"{recent:.1%} of the corrections of the last {WINDOW} steps only quote the reference's answer"
        ),
    ),
)
_DEAD_GROUPS = _Trend(
    "dead groups",
    "degenerate_groups",
    lambda recent, _: recent >= DEAD_GROUPS_SHARE,
    lambda recent, _: (
        f"{recent:.0%} of the groups of the last {WINDOW} steps have equal rewards and give no gradient; "
        "take harder or easier problems, or --dynamic-sampling"
    ),
)
"""Watched as a share of all groups of a step."""


def run_alarms(columns: Columns, *, groups_per_step: int | None) -> list[Alarm]:
    """Return every spell of every rule over a run, ongoing ones first, then the latest first.

    Spells that are less than WINDOW steps apart count as one.

    Args:
        columns: rows of the steps.
        groups_per_step: prompts per step; None: no alarm about dead groups.
    """
    alarms = [
        *_share(columns, "verifier fails", "reward_errors", REWARD_ERROR_SHARE, _failed),
        *_share(columns, "truncation", "truncated_responses", TRUNCATED_SHARE, _cut_off),
        *_rounding(columns),
    ]
    for trend in _TRENDS:
        alarms += _over_window(trend, *columns.values(trend.metric))
    if groups_per_step:
        steps, dead = columns.values(_DEAD_GROUPS.metric)
        alarms += _over_window(_DEAD_GROUPS, steps, dead / groups_per_step)
    return sorted(alarms, key=lambda alarm: (alarm.until is not None, -(alarm.until or alarm.since)))


def step_alarms(
    metrics: Mapping[str, float],
    *,
    responses: int,
    first_reward_error: str | None = None,
    most_reward_errors: float = 1.0,
) -> list[str]:
    """Return the lines to show above the progress of a step; empty if all is well.

    Args:
        metrics: metrics of the step, with `reward_errors` and `truncated_responses` counted over `responses`,
            and with `logprob_diff_bound` if `rounding_bound` gives one.
        responses: number of responses sampled in the step, without corrections.
        first_reward_error: the verifier's first error.
        most_reward_errors: share above which `check_reward_errors` reports instead.
    """
    if responses == 0:
        return []
    alarms = []
    errors, truncated = int(metrics.get("reward_errors", 0)), int(metrics.get("truncated_responses", 0))
    if REWARD_ERROR_SHARE <= errors / responses <= most_reward_errors:
        alarms.append(f"ALARM: {_failed(errors, responses)}{_because(first_reward_error)}")
    if truncated / responses >= TRUNCATED_SHARE:
        alarms.append(f"ALARM: {_cut_off(truncated, responses)}")
    difference, bound = metrics.get("logprob_diff_abs_mean", 0.0), metrics.get("logprob_diff_bound", math.inf)
    if difference > bound:
        alarms.append(f"ALARM: {_beyond_rounding(difference, bound)}")
    return alarms


def rounding_bound(config: Config, *, replays_mask: bool = False) -> float | None:
    """Return the mean |Δ log-prob| per token that precision may cause. None if trainer and engine differ for
    other reasons too: samples of older weights, a truncated distribution or quantized numbers.

    Args:
        config: configuration of a run, fully resolved.
        replays_mask: the engine recorded what top-k and top-p left, so that the trainer truncates alike.
    """
    rollout, loss = config.rollout, config.loss
    one_policy = not rollout.max_staleness and (
        loss.old_logprobs == "recompute" or loss.updates_per_rollout == 1
    )
    truncated = bool(rollout.truncation) and not replays_mask
    precision = sampling_precision(rollout)
    quantized = precision.is_quantized or {"fp8", "fp4"} & named_values(config.model.model_override).keys()
    if not one_policy or quantized or truncated:
        return None
    coarser = "bfloat16" if config.model.bf16 else precision.dtype
    return ROUNDING_BOUNDS[coarser]


def check_reward_errors(
    errors: int, responses: int, max_share: float, *, first_reward_error: str | None = None
) -> None:
    """Stop a run whose verifier does not work: the remaining responses teach nothing.

    Args:
        errors: responses of one step on which the verifier failed.
        responses: responses of that step.
        max_share: --max-reward-error-rate, the largest share of errors allowed.

    Raises:
        RewardErrorRateError: there are more.
    """
    if responses > 0 and errors / responses > max_share:
        raise RewardErrorRateError(
            f"the verifier failed on {errors:,} of {counted(responses, 'response')} of a step, more than "
            f"--max-reward-error-rate {max_share:g} allows{_because(first_reward_error)}"
        )


def _because(error: str | None) -> str:
    return f"; the first error: {error}" if error else ""


def _failed(errors: int, responses: int) -> str:
    return f"the verifier failed on {errors:,} of {counted(responses, 'response')}"


def _cut_off(truncated: int, responses: int) -> str:
    return (
        f"{truncated:,} of {counted(responses, 'response')} were cut off at the length limit; raise "
        "--rollout-max-response-len, or check that the model ends its answers (eos_token)"
    )


def _beyond_rounding(difference: float, bound: float) -> str:
    precision = next(
        (name for name, bound_of_precision in ROUNDING_BOUNDS.items() if bound_of_precision == bound),
        "rounding",
    )
    advice = (
        "try --vllm-dtype float32 if the trainer is in float32 (bfloat16 drops small updates), or --use-tis"
        if precision == "bfloat16"
        else "--check-weight-update-equal tells whether the engine has the trainer's weights"
    )
    return (
        f"log-probs of trainer and engine are {difference:.3g} apart per token (mean |Δ|), more than the "
        f"{bound:g} expected of {precision}: the engine does not sample from the policy that is trained; "
        f"{advice}"
    )


def _share(
    columns: Columns, name: str, metric: str, share: float, reason: Callable[[int, int], str]
) -> list[Alarm]:
    """Return the spells in which a count is at least a share of a step's responses; these are their tokens
    over their mean length."""
    series = columns.values(metric, "tokens_responses", "response_length")
    steps, counts, tokens, length = (values[series[3] > 0] for values in series)
    responses = np.round(tokens / length)
    active = counts / responses >= share
    return _spells(name, metric, steps, active, lambda n: reason(int(counts[n]), int(responses[n])))


def _rounding(columns: Columns) -> list[Alarm]:
    metric = "logprob_diff_abs_mean"
    steps, difference, bound = columns.values(metric, "logprob_diff_bound")
    return _spells(
        "differs beyond rounding",
        metric,
        steps,
        difference > bound,
        lambda n: _beyond_rounding(float(difference[n]), float(bound[n])),
    )


def _over_window(trend: _Trend, steps: Array, values: Array) -> list[Alarm]:
    if len(values) < WINDOW:
        return []
    means = np.lib.stride_tricks.sliding_window_view(values, WINDOW).mean(axis=1)
    start = float(means[0])
    return _spells(
        trend.name,
        trend.metric,
        steps[WINDOW - 1 :],
        trend.holds(means, start),
        lambda n: trend.reason(float(means[n]), start),
    )


def _spells(
    name: str, metric: str, steps: Array, active: npt.NDArray[np.bool_], reason: Callable[[int], str]
) -> list[Alarm]:
    """Return an alarm for each spell of steps in which a rule is active.

    Args:
        steps: those that the rule can judge.
        reason: gives the reason at the n-th of these steps.
    """
    spells: list[tuple[int, int, int]] = []
    for number in np.flatnonzero(active).tolist():
        step = int(steps[number])
        since = spells.pop()[0] if spells and step - spells[-1][1] < WINDOW else step
        spells.append((since, step, number))
    return [
        Alarm(name, metric, since, until if until < steps[-1] else None, reason(number))
        for since, until, number in spells
    ]
