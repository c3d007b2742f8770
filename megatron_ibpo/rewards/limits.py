"""A limit on the processor time that a response can make a judge spend."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ibpo.basics.reward_errors import ResponseError

_REPEAT_S = 0.2
"""Seconds until the next try, in case a library swallowed the exception."""


class _TimeUp(BaseException):
    """The exception of the time limit. It is not an Exception, so that fewer libraries swallow it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End a computation that takes longer, by a signal. Only a main thread gets signals; elsewhere there is
    no limit.

    Code that never returns to the interpreter is left to the worker pool, which kills the process.

    Args:
        seconds: processor time, so that a busy machine makes no answer wrong.

    Raises:
        ResponseError: the computation took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: Any) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGVTALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TimeUp:
        raise ResponseError(f"not judged within {seconds:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
