"""Counts, lists, values and errors as text; and faults of users' code: where they were raised, for a line of
a message, and their tracebacks, for a log."""

import os
import reprlib
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return each setting that differs, with both values."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names]


_LONGEST_ERROR = 500


def error_text(error: BaseException) -> str:
    """Return the type and message of any exception, of 500 characters at most, for a log, without keys."""
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


REWARD_FAULTS = "reward_faults.log"
"""File of tracebacks in the folder logs/ of a run's directory."""
_LONGEST_TRACE = 20_000
"""Characters of a traceback that are kept: the last ones, which name the cause."""
_MOST_BYTES = 1 << 20
"""Size to which a log of tracebacks may grow."""
user_files: set[str] = set()
"""Files of the user's code that this process has loaded by import paths."""
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def fault_text(error: BaseException, *ours: str) -> str:
    """Return an error with the user's line that raised it: `KeyError: 'answer' (rewards.py:12 in score)`.

    Args:
        ours: folders and files whose lines only call the user's code.
    """
    return f"{error_text(error)}{fault_place(error, *ours)}"


def fault_place(error: BaseException, *ours: str) -> str:
    """Return " (file:line in function)" of the user's last line before the error: outside of `ours` and, if
    there is one, outside of installed libraries; "" if there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and os.path.dirname(frame.filename) not in ours
    ]
    user_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen "))]
    last = (user_frames or frames)[-1:]
    return "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in last)


def place_in_users_code(error: BaseException) -> str:
    """Return " (file:line in function)" of the last line of one of `user_files` before the error, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if frame.filename in user_files][-1:]
    return "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in last)


def trace_text(error: BaseException) -> str:
    """Return the traceback of any exception, shortened at its beginning."""
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # such as of an exception group that cannot be shown
        trace = "".join(traceback.format_tb(error.__traceback__))
    return printable(without_keys(trace)[-_LONGEST_TRACE:])


def append_trace(path: Path, title: str, trace: str) -> None:
    """Append a traceback to a log while that is small. Nothing depends on it: a full disk is no error."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(title)}\n{trace.rstrip()}\n\n")
