"""Bounds on the cost of judging: many responses per message to a worker, and a limit on the processor time of
each."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_ibpo.basics.reward_value import ResponseError

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

    previous_handler = signal.signal(signal.SIGVTALRM, give_up)
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
        signal.signal(signal.SIGVTALRM, previous_handler)


def in_batches(judge: Callable[[str, str, str, dict[str, Any]], Any]) -> Callable[..., list[Any]]:
    """Return a batched verifier (`rewards.Verifier`) that judges each response by itself.

    Args:
        judge: (prompt, response, label, metadata) → value.
    """

    def score(
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[str],
        metadata: Sequence[dict[str, Any]],
    ) -> list[Any]:
        return [judge(*row) for row in zip(prompts, responses, labels, metadata, strict=True)]

    score.batched = True  # type: ignore[attr-defined]
    return score
