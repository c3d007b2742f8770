"""Reward functions of the checks. A worker process imports them, and with them nothing that takes time."""

import time
import zlib
from typing import Any


def score(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """Return 1 for about half of all texts, and 0 for the others: random models answer nothing correctly, and
    credit needs both kinds."""
    return float(zlib.crc32(response.encode(errors="replace")) % 2)


def broken(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """Raise, as a reward function with a fault in it."""
    raise RuntimeError("this function fails, to see what becomes of it")


def hanging(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """Take longer than any time-out here."""
    time.sleep(60)
    return 0.0
