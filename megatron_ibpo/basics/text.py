"""Counts, lists and values in words."""

import reprlib
from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """The count with its noun, singular for one: "1 rank", "2,048 prompts". The plural is a plain -s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: object) -> str:
    """The value in a message, shortened where it is long, also where it holds itself or others many times."""
    return _SHORT.repr(value)


def listed(names: Sequence[str], separator: str = ", ", *, most: int) -> str:
    """The first `most` names, and how many there are besides: a message stays one that can be read."""
    left = len(names) - most
    return separator.join(names[:most]) + (f" and {left} more" if left > 0 else "")
