"""A worker process: runs a reward function on what the owner sends, until the owner goes away.

Started as `python -m megatron_ibpo.rewards.worker FD OWNER MODULE:FUNCTION`. It answers ("ready", whether the
function is batched) or ("failed", why) once, and then to every message, a list of tuples of arguments,
("outcomes", a (number, None) or (None, why) for each), or ("error", why) where there are none.

A function is batched if it has an attribute `batched` that is true. It is given the arguments of many calls
at once, as a list for each argument, and returns a number for each call; others are given those of one call.
"""

import ctypes
import math
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from megatron_ibpo.config import ConfigError, load_hook

_PR_SET_PDEATHSIG = 1
_LONGEST_ERROR = 500


def main() -> None:
    """Serve until the connection closes."""
    fd, owner, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    _die_with(owner)
    connection = Connection(fd)
    try:
        function = load_hook("--rm-type", target)
        if not callable(function):
            raise ConfigError(f"--rm-type {target}: is not a function")
    except ConfigError as error:
        connection.send(("failed", _printable(str(error))))
        return
    except BaseException as error:
        connection.send(("failed", f"--rm-type {target}: {_in_words(error)}"))
        return
    connection.send(("ready", bool(getattr(function, "batched", False))))
    while True:
        try:
            calls = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_answer(function, calls))


def _answer(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> tuple[str, Any]:
    try:
        if not getattr(function, "batched", False):
            values = [function(*arguments) for arguments in calls]
        else:
            values = list(function(*map(list, zip(*calls, strict=True))))
            if len(values) != len(calls):
                raise ValueError(f"expected {len(calls)} numbers, got {len(values)}")
    except BaseException as error:
        return "error", _in_words(error)
    return "outcomes", [_number(value) for value in values]


def _number(value: Any) -> tuple[float | None, str | None]:
    """(the value, None), or (None, why it is no reward)."""
    if not isinstance(value, Real):
        return None, f"TypeError: expected a number, got {type(value).__name__} {value!r}"[:_LONGEST_ERROR]
    if not math.isfinite(value):
        return None, f"ValueError: expected a finite number, got {value}"
    return float(value), None


def _in_words(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception as in_turn:  # an exception of the user's own may fail at that too
        said = f"it cannot be shown, which fails with {type(in_turn).__name__}"
    return _printable(f"{type(error).__name__}: {said}"[:_LONGEST_ERROR])


def _printable(text: str) -> str:
    """Half characters as escapes: no log can write them."""
    return text.encode(errors="backslashreplace").decode()


def _die_with(owner: int) -> None:
    """Have the kernel kill this process when its owner dies, even if a reward function then hangs in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        sys.exit("the owner of this worker is gone")


if __name__ == "__main__":
    main()
