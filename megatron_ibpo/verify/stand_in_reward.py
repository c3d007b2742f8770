"""The reward of the small run: random models answer nothing correctly, and credit needs both kinds."""

import zlib
from typing import Any


def score(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """Return 1 for about half of all texts, and 0 for the others."""
    return float(zlib.crc32(response.encode(errors="replace")) % 2)
