"""An end to what a response makes a judge compute."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ibpo.rewards.reward_errors import ResponseError

_REPEAT_S = 0.2
"""Until the next try, where a library has swallowed the exception."""


class _TimeUp(BaseException):
    """No Exception, so that fewer libraries swallow it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Ends what takes longer, by a signal, which only a main thread gets; elsewhere there is no limit. What
    never comes back to the interpreter is left to the worker pool, which kills.

    Args:
        seconds: of processor time, so that a busy machine makes nobody wrong.

    Raises:
        ResponseError: it took longer.
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
