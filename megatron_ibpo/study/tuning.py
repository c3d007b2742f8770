"""What tuning chooses for a method on a task, and whether the grid was wide enough to choose from.

A best value at the end of its axis says that a better one may lie beyond. So the grid is extended there by
one value, as far from the last as that is from the one before, and again while the best is the last. A best
that lies at the end after a number of values is taken, and marked: nothing is claimed of a method, or against
a baseline, that was tuned so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_ibpo.study.plan import Settings


@dataclass(frozen=True)
class Tried:
    """One tuning run."""

    setting: Settings
    seed: int
    accuracy: float
    """In the end, on the problems of tuning."""
    greedy: float
    steps: int


@dataclass(frozen=True)
class Choice:
    """What one method was tuned to on one task."""

    task: str
    method: str
    setting: Settings
    """The combination with the highest mean accuracy; of equal ones the first."""
    at_edge: tuple[str, ...]
    """Settings whose best value is the smallest or the largest that was tried."""
    tried: list[Tried]


def choose(task: str, method: str, tried: Sequence[Tried]) -> Choice:
    """The best combination of those that were tried; at least one."""
    by_point: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for run in tried:
        by_point.setdefault(tuple(run.setting.items()), []).append(run.accuracy)
    best_point = max(by_point, key=lambda point: fmean(by_point[point]))
    best = dict(best_point)
    settings = [dict(point) for point in by_point]
    edges = tuple(key for key in best if _beyond(key, best, settings) is not None)
    return Choice(task, method, best, edges, list(tried))


def beyond(choice: Choice) -> dict[str, Settings]:
    """For each setting that is at an edge, the combination one value further, the rest as the best has it."""
    tried = [run.setting for run in choice.tried]
    return {key: choice.setting | {key: _beyond(key, choice.setting, tried)} for key in choice.at_edge}


def _beyond(key: str, best: Settings, settings: Sequence[Settings]) -> float | int | None:
    """The value after the end of an axis that the best one lies at, in equal ratios. None where it lies
    inside, where there is no axis (one value, or values that are no numbers above 0), or no whole number
    beyond."""
    values = {setting[key] for setting in settings}
    if len(values) < 2 or not all(_is_positive(value) for value in values):
        return None
    ascending = sorted(values)
    if best[key] == ascending[-1]:
        last, before = ascending[-1], ascending[-2]
    elif best[key] == ascending[0]:
        last, before = ascending[0], ascending[1]
    else:
        return None
    value = last * last / before
    if all(isinstance(value, int) for value in values):
        value = round(value)
        return value if value >= 1 and value not in values else None
    return float(f"{value:.6g}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
