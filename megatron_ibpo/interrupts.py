"""Ctrl-C, SIGTERM and a closed terminal: finish the step, save, stop; at once when asked again."""

import errno
import io
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

REPEAT_AFTER_S = 2.0
"""A launcher passes a Ctrl-C on that the terminal has sent already: signals this close are one."""
OUTPUT = (1, 2)


class StopRequest:
    """Notes the first signal; a second one raises KeyboardInterrupt where the program stands.

    SIGHUP stays ignored where it is (nohup).
    """

    def __init__(self, hangup_log: Path) -> None:
        """Listen from now on.

        Args:
            hangup_log: file for what is said after the terminal, or what reads a pipe, has gone.
        """
        for descriptor, name in zip(OUTPUT, ("stdout", "stderr"), strict=True):
            if (stream := getattr(sys, name)) is getattr(sys, f"__{name}__") and stream is not None:
                stream.flush()
                lasting = io.BufferedWriter(_LastingOutput(descriptor, hangup_log))
                setattr(
                    sys, name, io.TextIOWrapper(lasting, stream.encoding, stream.errors, line_buffering=True)
                )
        self._hangup_log = hangup_log
        self._asked_at: float | None = None
        self._at_once = False
        """Nothing is lost by stopping where the program stands."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    @property
    def requested(self) -> bool:
        return self._asked_at is not None

    def cuts_short(self, work: Callable[[], T]) -> T | None:
        """What `work` gives, during which nothing can be lost; None where a signal has come or comes."""
        if self.requested:
            return None
        self._at_once = True
        try:
            return work()
        except KeyboardInterrupt:
            if not self._at_once:
                raise
            return None
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            _output_to(self._hangup_log)
        if self._asked_at is None:
            self._asked_at = now
            if self._at_once:
                raise KeyboardInterrupt
            # not by print, in the middle of which this may come
            with suppress(OSError):
                os.write(OUTPUT[0], b"stopping after this step; once more to stop at once\n")
        elif now - self._asked_at > REPEAT_AFTER_S:
            self._at_once = False
            raise KeyboardInterrupt


class _LastingOutput(io.FileIO):
    """What a run says goes to a file once nothing takes it any more: no run ends for want of a reader."""

    def __init__(self, descriptor: int, log: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            _output_to(self._log, [self.fileno()])
            return super().write(data)


def _output_to(log: Path, descriptors: Sequence[int] = OUTPUT) -> None:
    """From the terminal that is gone, or a pipe whose reader went with it, to a file. Where output goes to a
    file it stays."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.dup2(file, descriptor)
    os.close(file)
