"""The error for a configuration that cannot work, and helpers for its message."""

import difflib
from collections.abc import Iterable, Mapping

_RESEMBLANCE = 0.5
"""Smallest share of matching letters for a suggestion; weaker matches would only puzzle the user."""
_LONGEST = 200
"""Characters of an unknown name that are compared: a data row may have any number of them."""


class ConfigError(ValueError):
    """A configuration that cannot work. The message names every problem and what to do."""


def broken(rules: Mapping[str, bool]) -> list[str]:
    """Return the problems that are present.

    Args:
        rules: problem → True if it is present.
    """
    return [problem for problem, is_there in rules.items() if is_there]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean 'lr'?`, or "" if no name is close.

    Args:
        known: names as the user types them; dashes and underscores are equivalent.
    """
    close = nearest_name(name, known)
    return "" if close is None else f"; did you mean {close!r}?"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to an unknown one; None if none is close."""
    spellings = {str(other).replace("_", "-"): other for other in known}
    close = difflib.get_close_matches(
        str(name)[:_LONGEST].replace("_", "-"), spellings, n=1, cutoff=_RESEMBLANCE
    )
    return spellings[close[0]] if close else None
