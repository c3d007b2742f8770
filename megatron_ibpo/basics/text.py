"""Counts, lists and values as text."""

import reprlib
from collections.abc import Sequence

from megatron_ibpo.basics.redaction import without_keys


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
    num_omitted = len(names) - most
    return separator.join(names[:most]) + (f" and {num_omitted} more" if num_omitted > 0 else "")


_LONGEST_ERROR = 500


def error_text(error: BaseException) -> str:
    """Return the type and message of any exception, of 500 characters at most, as a log can write them, and
    without keys."""
    try:
        message = str(error)
    except Exception as in_turn:  # a user's exception may fail at that too
        message = f"it cannot be shown, which fails with {type(in_turn).__name__}"
    message = message[: 2 * _LONGEST_ERROR]  # a key at the end of this is not cut in pieces that are shown
    return printable(without_keys(f"{type(error).__name__}: {message}")[:_LONGEST_ERROR])


def printable(text: str) -> str:
    """Return lone surrogates as escapes: no log can write them."""
    return text.encode(errors="backslashreplace").decode()


def legible(text: str) -> str:
    """Return the text with escapes for characters that are invisible, turn text around, or would be obeyed by
    a terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text
    )
