"""Limits on the time of computations in this process, by signals."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megatron_ibpo.basics.reward_value import ResponseError

_SIGNALS = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_VIRTUAL: signal.SIGVTALRM}


class _TimeUp(BaseException):
    """The exception of the time limit. It is not an Exception, so that fewer libraries swallow it."""


@contextmanager
def time_limit(timer: int, seconds: float, fault: Exception, repeat_s: float = 0.2) -> Iterator[None]:
    """End a computation that takes longer by raising `fault`. Only a main thread gets signals; elsewhere
    there is no limit.

    Args:
        timer: signal.ITIMER_REAL for seconds of the clock, ITIMER_VIRTUAL for those of processor time.
        repeat_s: seconds until it is stopped again, in case a library has swallowed the exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: Any) -> None:
        raise _TimeUp

    previous_handler = signal.signal(_SIGNALS[timer], give_up)
    previous_timer = signal.getitimer(timer)
    try:
        signal.setitimer(timer, seconds, repeat_s)
        try:
            yield
        finally:
            signal.setitimer(timer, 0)
    except _TimeUp:
        raise fault from None
    finally:
        signal.setitimer(timer, 0)
        signal.signal(_SIGNALS[timer], previous_handler)
        signal.setitimer(timer, *previous_timer)


def cpu_limit(seconds: float) -> AbstractContextManager[None]:
    """End a computation that takes longer in a main thread, by a signal that raises ResponseError. Code that
    never returns to the interpreter is left to the worker pool, which kills the process. The seconds are of
    processor time, so that a busy machine makes no answer wrong."""
    fault = ResponseError(f"not judged within {seconds:g} s of processor time")
    return time_limit(signal.ITIMER_VIRTUAL, seconds, fault)
