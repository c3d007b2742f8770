"""Counts, lists and values as text."""

import reprlib
from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, singular for one: "1 rank", "2,048 prompts". The plural is a plain
    -s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: object) -> str:
    """Return the value for a message, shortened if long, also if it contains itself or repeats others many
    times."""
    return _SHORT.repr(value)


def listed(names: Sequence[str], separator: str = ", ", *, most: int) -> str:
    """Return the first `most` names and the number of others, to keep messages readable."""
    left = len(names) - most
    return separator.join(names[:most]) + (f" and {left} more" if left > 0 else "")
