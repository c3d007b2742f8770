"""Ctrl-C, SIGTERM and a closed terminal: finish the step, save, stop; on a second request stop at once."""

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
"""Signals this close count as one: a launcher passes on a Ctrl-C that the terminal has sent already."""
OUTPUT = (1, 2)


class StopRequest:
    """Records the first signal; a second one raises KeyboardInterrupt at the present instruction.

    SIGHUP stays ignored where it is (nohup).
    """

    def __init__(self, hangup_log: Path) -> None:
        """Install the signal handlers.

        Args:
            hangup_log: file for output after the terminal, or the reader of a pipe, has gone.
        """
        for descriptor, name in zip(OUTPUT, ("stdout", "stderr"), strict=True):
            if (stream := getattr(sys, name)) is getattr(sys, f"__{name}__") and stream is not None:
                stream.reconfigure(line_buffering=True)
                setattr(sys, name, _LastingOutput(stream, descriptor, hangup_log))
        self._hangup_log = hangup_log
        self._asked_at: float | None = None
        self._at_once = False
        """True while nothing is lost by stopping at once."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    @property
    def requested(self) -> bool:
        return self._asked_at is not None

    def cuts_short(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, which a signal may interrupt without loss; None after a signal."""
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
        received_at = time.monotonic()
        if number == signal.SIGHUP:
            _output_to(self._hangup_log)
        if self._asked_at is None:
            self._asked_at = received_at
            if self._at_once:
                raise KeyboardInterrupt
            # not by print, since this handler may interrupt a print
            with suppress(OSError):
                os.write(OUTPUT[0], b"stopping after this step; once more to stop at once\n")
        elif received_at - self._asked_at > REPEAT_AFTER_S:
            self._at_once = False
            raise KeyboardInterrupt


class _LastingOutput:
    """Output of a run that moves to a file once nothing reads it, so that no run ends for lack of a reader.

    It wraps the stream rather than its buffer. A signal handler may raise within a method of this class, and
    a buffer would take that for a failed write and print the same text again.
    """

    def __init__(self, stream: io.TextIOWrapper, descriptor: int, log: Path) -> None:
        self._stream, self._descriptor, self._log = stream, descriptor, log

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._move(error)
            if self._stream.write_through:  # without a buffer (PYTHONUNBUFFERED) the text was not kept
                self._stream.write(text)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._move(error)

    def _move(self, error: OSError) -> None:
        """Continue in the file, with the rest of the buffer; raise other errors."""
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        _output_to(self._log, [self._descriptor])
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _output_to(log: Path, descriptors: Sequence[int] = OUTPUT) -> None:
    """Redirect output from a terminal that is gone, or a pipe whose reader is gone, to a file. Output that
    goes to a file stays."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.dup2(file, descriptor)
    os.close(file)
