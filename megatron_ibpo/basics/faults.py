"""Faults of users' code: where they were raised, for a line of a message, and their tracebacks, for a log."""

import os
import sysconfig
import time
import traceback
from contextlib import suppress
from pathlib import Path

from megatron_ibpo.basics.redaction import without_keys
from megatron_ibpo.basics.text import error_text, printable

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
    """Return " (file:line in function)" of the last line of a file in `user_files` before the error; "" if
    none is involved."""
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
    """Append a traceback to a log, as long as that is small. Nothing depends on it, so a disk that refuses is
    no error."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(title)}\n{trace.rstrip()}\n\n")
