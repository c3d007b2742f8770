"""What is wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CheckpointError", "listed"]

SHOWN = 8
"""Names listed in an error before it only counts."""


class CheckpointError(ValueError):
    """A checkpoint's files or tensors are not what the model needs."""


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
