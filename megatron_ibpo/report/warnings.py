"""Warnings of the program's loggers during a run, shown to the user: above all deaths and what followed
them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRAM = "megatron_ibpo"


class _Shown(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(self.format(record))
        except Exception:
            self.handleError(record)


@contextmanager
def warnings_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Pass every warning of the program to `show`, from any thread, with the time of day.

    Otherwise Python would print them to stderr, without the time and beside the display.
    """
    handler = _Shown(show)
    logger = logging.getLogger(PROGRAM)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
