"""summary.json: what came of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["COUNTS", "summarise"]

COUNTS = (
    "truncated_responses",
    "truncated_corrections",
    "reward_errors",
    "correction_reward_errors",
    "skipped_pairs",
    "empty_masks",
    "groups_discarded",
    "groups_filled_up",
    "corrections_skipped",
    "bonuses_withheld",
    "degenerate_groups",
    "degenerate_correction_groups",
    "sequences_without_advantage",
    "updates_skipped",
    "critic_updates_skipped",
    "updates_empty",
)
"""Metrics that count what was dropped or failed; a summary gives their sums over the run."""
_RUNNING_TOTALS = ("engine_restarts",)
"""Metrics that are sums already; a summary gives the largest."""
_SPENT = ("spent_accelerator_seconds", "spent_tokens", "spent_flops")
"""Running totals of the whole run, resumed or not."""
_REWARD_STEPS = 5


def summarise(
    rows: Sequence[Mapping[str, Any]], *, seconds_total: float, seconds_by_stage: Mapping[str, float]
) -> dict[str, Any]:
    """The summary of a metrics log.

    accuracy_* and greedy_* are those of the first and the last evaluation (sampled at the rollout
    temperature, and greedy); reward_* the mean training reward of the first and the last five steps. Values
    that were never measured are None. seconds_* are of this process: a resumed run counts from there.
    """
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    steps = [row for row in rows if row["kind"] == "step"]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    rewards = [row["reward"] for row in steps if row.get("reward") is not None]
    counts = {name: sum(row[name] or 0 for row in rows if name in row) for name in COUNTS}
    counts |= {name: max((row.get(name) or 0 for row in rows), default=0) for name in _RUNNING_TOTALS}
    return {
        "accuracy_start": first.get("accuracy"),
        "accuracy_end": last.get("accuracy"),
        "greedy_start": first.get("greedy_accuracy"),
        "greedy_end": last.get("greedy_accuracy"),
        "reward_start": _mean(rewards[:_REWARD_STEPS]),
        "reward_end": _mean(rewards[-_REWARD_STEPS:]),
        "spent": {name: rows[-1][name] for name in _SPENT if rows and name in rows[-1]},
        "steps": max((row["step"] for row in steps), default=0),
        "seconds_total": round(seconds_total, 2),
        "seconds_by_stage": {name: round(value, 2) for name, value in seconds_by_stage.items()},
        "counts": {name: int(count) for name, count in counts.items()},
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
