"""Differences between runs: settings and results."""

from collections.abc import Mapping, Sequence
from typing import Any

_PLACES = {"run-dir", "load"}
"""Settings with a run's location: they differ between any two runs."""


def comparison(overviews: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return, for the runs among the overviews, rows of a name and one value per overview (None if it has
    none).

    Returns:
        "settings": those that differ between runs. "numbers": all of the last numbers.
    """
    runs = [overview for overview in overviews if overview["kind"] == "run"]

    def rows(part: str) -> list[list[Any]]:
        names = dict.fromkeys(name for run in runs for name in run[part])
        return [[name, *(overview[part].get(name) for overview in overviews)] for name in names]

    def differs(row: list[Any]) -> bool:
        values = [
            value for value, overview in zip(row[1:], overviews, strict=True) if overview["kind"] == "run"
        ]
        return any(value != values[0] for value in values)

    settings = [row for row in rows("settings") if row[0] not in _PLACES and differs(row)]
    return {"settings": settings, "numbers": rows("last")}
