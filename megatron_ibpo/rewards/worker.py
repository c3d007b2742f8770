"""A worker process: runs a reward function on what the owner sends, until the owner goes away.

Started as `python -m megatron_ibpo.rewards.worker FD OWNER MODULE:FUNCTION`. It answers ("ready", None) or
("failed", why) once, and then ("value", number) or ("error", why) to every message, a tuple of arguments.
"""

from __future__ import annotations

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle: it may finish its step
    connection = Connection(fd)
    try:
        function = load_hook("--rm-type", target)
        if not callable(function):
            raise ConfigError(f"--rm-type {target}: is not a function")
    except ConfigError as error:
        connection.send(("failed", str(error)))
        return
    except BaseException as error:
        connection.send(("failed", f"--rm-type {target}: {_in_words(error)}"))
        return
    connection.send(("ready", None))
    while True:
        try:
            arguments = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_answer(function, arguments))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        value = function(*arguments)
        if not isinstance(value, Real):
            raise TypeError(f"expected a number, got {type(value).__name__} {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"expected a finite number, got {value}")
        return "value", float(value)
    except BaseException as error:
        return "error", _in_words(error)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]


def _die_with(owner: int) -> None:
    """Have the kernel kill this process when its owner dies, even if a reward function then hangs in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        sys.exit("the owner of this worker is gone")


if __name__ == "__main__":
    main()
