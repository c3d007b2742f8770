"""Ctrl-C and SIGTERM: finish the step, save, stop; at once when asked again."""

import signal
import time
from types import FrameType

REPEAT_AFTER_S = 2.0
"""A launcher passes a Ctrl-C on that the terminal has sent already: signals this close are one."""


class StopRequest:
    """Notes the first signal; a second one raises KeyboardInterrupt where the program stands."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    @property
    def requested(self) -> bool:
        return self._asked_at is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            print("stopping after this step; once more to stop at once", flush=True)
        elif now - self._asked_at > REPEAT_AFTER_S:
            raise KeyboardInterrupt
