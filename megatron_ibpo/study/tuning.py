"""The choice of tuned settings for a method on a task, and whether the grid was wide enough.

A best value at the end of its axis suggests that a better one lies beyond. The grid is then extended there by
one value, in the ratio of the last two, and again while the best is the last. If the best is still at the end
after a number of extensions, it is taken and marked: no claim is made about a method, or against a baseline,
that was tuned so.
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
    """Final accuracy on the problems of tuning."""
    greedy: float
    steps: int


@dataclass(frozen=True)
class Choice:
    """The settings chosen for one method on one task."""

    task: str
    method: str
    setting: Settings
    """Combination with the highest mean accuracy, the first of equal ones."""
    at_edge: tuple[str, ...]
    """Settings whose best value is the smallest or the largest that was tried."""
    tried: list[Tried]


def choose(task: str, method: str, tried: Sequence[Tried]) -> Choice:
    """Return the best of the combinations tried; needs at least one."""
    by_point: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for run in tried:
        by_point.setdefault(tuple(run.setting.items()), []).append(run.accuracy)
    best_point = max(by_point, key=lambda point: fmean(by_point[point]))
    best = dict(best_point)
    settings = [dict(point) for point in by_point]
    edges = tuple(key for key in best if _beyond(key, best, settings) is not None)
    return Choice(task, method, best, edges, list(tried))


def beyond(choice: Choice) -> dict[str, Settings]:
    """Return, for each setting at an edge, the best combination with that setting one value further."""
    tried = [run.setting for run in choice.tried]
    return {key: choice.setting | {key: _beyond(key, choice.setting, tried)} for key in choice.at_edge}


def _beyond(key: str, best: Settings, settings: Sequence[Settings]) -> float | int | None:
    """Return the value beyond the end of an axis where the best one lies, in equal ratios. None if the best
    lies inside, if there is no axis (one value, or values that are no numbers above 0), or if no whole number
    lies beyond."""
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
