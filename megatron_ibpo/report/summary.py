"""summary.json: the results of a run, and whether its corrections paid."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from megatron_ibpo.credit.metrics import ACCOMPANIED, ALONE, skill_needed
from megatron_ibpo.evaluate.accuracy import wilson
from megatron_ibpo.report.stages import prediction_error

COUNTS = (
    "truncated_responses",
    "truncated_corrections",
    "reward_errors",
    "correction_reward_errors",
    "response_errors",
    "skipped_pairs",
    "empty_masks",
    "weightless_responses",
    "groups_discarded",
    "groups_filled_up",
    "corrections_skipped",
    "bonuses_withheld",
    "overlong_penalties_limited",
    "degenerate_groups",
    "degenerate_correction_groups",
    "sequences_without_advantage",
    "updates_skipped",
    "critic_updates_skipped",
    "updates_empty",
    "groups_expired",
    "groups_refused",
    "tokens_discarded",
    "engine_deaths",
    "engine_restarts",
    "verifier_deaths",
    "environment_deaths",
    "trainer_restarts",
)
"""Metrics that count what was dropped, failed or died; a summary gives their sums over the run."""
_SPENT = (
    "spent_accelerator_seconds",
    "spent_tokens",
    "spent_flops",
    "spent_tokens_shared_prefixes",
    "spent_flops_shared_prefixes",
    "spent_flops_decoding",
    "spent_flops_charged",
)
"""Running totals of the whole run, resumed or not."""
_REWARD_STEPS = 5
_OF_SET = "eval/"
"""Prefix of the metrics of a named set: eval/SET/METRIC."""
_EVALUATED = {"accuracy": "accuracy", "greedy": "greedy_accuracy"}
"""Measures of a summary → metrics of an evaluation that always exist."""
HELD_OUT_LOSS = "held_out_loss"
"""Metric of an evaluation in supervised training, which has no others."""

Row = Mapping[str, Any]


def summarise(
    rows: Sequence[Row],
    *,
    seconds_total: float,
    seconds_by_stage: Mapping[str, float],
    since: Mapping[str, int] | None = None,
    predicted: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the summary of a metrics log.

    Pairs are NAME_start and NAME_end. A value that was not measured, or that cannot be compared with its
    pair, is None:
        accuracy, greedy, and with several samples per prompt pass_at_K, maj_at_K, best_of_K, corrected, or
            the held_out_loss of supervised training: by the evaluation before the first step and the one
            after the last step. A start that was measured on another number of problems than the end is
            None.
        reward: mean training reward of the first and of the last five steps, or of the two halves of a
            shorter run, the step in the middle left out.
    break_even: whether corrections paid, by the run's own figures.
    prediction_error: predicted over measured seconds of a step and of its parts, less 1; None without either.
    seconds_* are of this process: a resumed run counts from there.

    Args:
        since: counts since the last row.
        predicted: seconds, by the names of `report.stages`.
    """
    steps = [row for row in rows if row["kind"] == "step"]
    counts = {name: sum(row.get(name) or 0 for row in [*rows, since or {}]) for name in COUNTS}
    return {
        **_accuracies(rows, steps),
        **_rewards(steps),
        "spent": {name: rows[-1][name] for name in _SPENT if rows and name in rows[-1]},
        "steps": max((row["step"] for row in steps), default=0),
        "seconds_total": round(seconds_total, 2),
        "seconds_by_stage": {name: round(value, 2) for name, value in seconds_by_stage.items()},
        "counts": {name: int(count) for name, count in counts.items()},
        "break_even": break_even(steps),
        "prediction_error": None if predicted is None else prediction_error(predicted, steps),
    }


def _accuracies(rows: Sequence[Row], steps: Sequence[Row]) -> dict[str, float | None]:
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    start: Row = {}
    end: Row = {}
    if evaluations and (not steps or evaluations[0]["step"] < steps[0]["step"]):
        start = evaluations[0]
    if steps and evaluations and evaluations[-1]["step"] >= steps[-1]["step"]:
        end = evaluations[-1]
    if start and end and _numbers_of_prompts(start) != _numbers_of_prompts(end):
        start = {}
    metric_of = {name: metric for row in (start, end) if row for name, metric in measures(row).items()}
    metric_of = metric_of or _EVALUATED
    return {
        f"{name}_{when}": row.get(metric) if name in measures(row) else None
        for name, metric in metric_of.items()
        for when, row in (("start", start), ("end", end))
    }


def measures(evaluation: Row) -> dict[str, str]:
    """Return the measures of one evaluation and the metrics that hold them. Measures of named sets are called
    SET/MEASURE; those of a set without a name come first."""
    sets = list(dict.fromkeys(name.split("/")[1] for name in evaluation if name.startswith(_OF_SET)))
    is_unnamed = not sets or "accuracy" in evaluation
    metric_of = _measures_of_set(evaluation) if is_unnamed else {}
    for name in sets:
        prefix = f"{_OF_SET}{name}/"
        metrics_of_set = {key.removeprefix(prefix): key for key in evaluation if key.startswith(prefix)}
        of_set = _measures_of_set({key: evaluation[metric] for key, metric in metrics_of_set.items()})
        metric_of |= {f"{name}/{measure}": metrics_of_set[metric] for measure, metric in of_set.items()}
    return metric_of


def _measures_of_set(evaluation: Row) -> dict[str, str]:
    samples = evaluation.get("samples_per_prompt")
    several = {
        **{name: name for name in evaluation if name.startswith("pass_at_")},
        f"maj_at_{samples}": "majority_accuracy",
        f"best_of_{samples}": "best_of_accuracy",
        "corrected": "corrected_accuracy",
        HELD_OUT_LOSS: HELD_OUT_LOSS,
    }
    return _EVALUATED | {name: metric for name, metric in several.items() if metric in evaluation}


def _numbers_of_prompts(evaluation: Row) -> Row:
    """Return the number of prompts by set."""
    return {name: value for name, value in evaluation.items() if name.endswith("num_prompts")}


def _rewards(steps: Sequence[Row]) -> dict[str, float | None]:
    rewards = [row["reward"] for row in steps if row.get("reward") is not None]
    span = min(_REWARD_STEPS, len(rewards) // 2)  # no step is in both start and end
    return {
        "reward_start": _mean(rewards[:span]) if span else None,
        "reward_end": _mean(rewards[-span:]) if span else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ----------------------------------------------------------------------------------- whether corrections paid

_COMPOSITIONS = {ALONE: "no other response", ACCOMPANIED: "another response"}
_VERDICT = {
    True: ", so these are",
    False: ", so these are not",
    None: "; there were too few to tell whether these are",
}
_ORIGIN = (
    "That goes by success and cost in this run. Whether a run without corrections would have learned more "
    "for the same cost, only such a run tells (ibpo compare). On the default task GSPO reached a training "
    "reward of .75 with 58 % of the operations of IBPO, over five seeds (docs/paper_claims.md)."
)


def break_even(steps: Sequence[Row]) -> dict[str, Any] | None:
    """Return how a run's corrections compare with the break-even law of `credit.metrics.skill_needed`.

    Args:
        steps: rows of the metrics log.

    Returns:
        price (κ) and, for each composition that has corrections and responses, `resample` and `skill` (p and
        q, each with low and high of Wilson's 95 % interval), `needed` (the skill from which corrections pay)
        and `pays`: True or False if the intervals leave no doubt, else None. None without any such
        composition.
    """
    # runs of version 0.1 recorded a price beside the suffixes of reset-groups, which are no corrections
    priced_rows = [row for row in steps if row.get("correction_price") is not None and "corrections" in row]
    if not priced_rows:
        return None

    def total(name: str) -> float:
        return fsum(row[name] for row in priced_rows)

    price = fsum(row["correction_price"] * row["corrections"] for row in priced_rows) / total("corrections")
    result: dict[str, Any] = {"price": price}
    for composition in (ALONE, ACCOMPANIED):
        responses, corrections = total(f"responses_{composition}"), total(f"corrections_{composition}")
        if responses and corrections:
            resample = _share(total(f"responses_{composition}_correct"), responses)
            skill = _share(total(f"corrections_{composition}_correct"), corrections)
            result[composition] = _standing(resample, skill, price, first=composition == ALONE)
    return result


def _standing(
    resample: dict[str, float], skill: dict[str, float], price: float, *, first: bool
) -> dict[str, Any]:
    needed = {name: skill_needed(value, price, first=first) for name, value in resample.items()}
    pays = None
    if skill["low"] > needed["high"]:
        pays = True
    elif skill["high"] < needed["low"]:
        pays = False
    return {"resample": resample, "skill": skill, "needed": needed["estimate"], "pays": pays}


def _share(successes: float, trials: float) -> dict[str, float]:
    low, high = wilson(successes / trials, trials)
    return {"estimate": successes / trials, "low": low, "high": high}


def break_even_lines(comparison: dict[str, Any] | None) -> list[str]:
    """Return the result of `break_even` in sentences for the user, with its source; empty for nothing."""
    sentences = [
        _sentence(name, comparison[name]) for name in _COMPOSITIONS if comparison and name in comparison
    ]
    if not comparison or not sentences:
        return []
    return [f"A correction costs as much as {comparison['price']:.1f} responses.", *sentences, _ORIGIN]


def _sentence(composition: str, standing: dict[str, Any]) -> str:
    skill, resample, needed = standing["skill"], standing["resample"], standing["needed"]
    rates = (
        f"If {_COMPOSITIONS[composition]} to the prompt is right, {skill['estimate']:.0%} of corrections and "
        f"{resample['estimate']:.0%} of retries succeed."
    )
    if resample["estimate"] == 0:
        reason = "no retry succeeded" + (", and no correction" if skill["estimate"] == 0 else "")
        return f"{rates} Whether corrections are worth their cost cannot be told: {reason}."
    if needed <= 1:
        return f"{rates} Corrections are worth their cost from {needed:.0%} on{_VERDICT[standing['pays']]}."
    sure = "" if standing["pays"] is False else "; there were too few to be sure"
    return f"{rates} Corrections cannot be worth their cost where retries succeed so often{sure}."
