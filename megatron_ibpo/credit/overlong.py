"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ibpo.records import Response

__all__ = ["overlong_penalty", "with_overlong_penalty"]


def overlong_penalty(length: int, max_length: int, buffer: float) -> float:
    """Between 0 and -1: how far a response of `length` tokens reaches into the last `buffer` tokens before
    `max_length`."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer)) if buffer > 0 else 0.0


def with_overlong_penalty(
    rewards: Sequence[float | None], responses: Iterable[Response], max_length: int, buffer_share: float
) -> list[float | None]:
    """Rewards with the penalty of their response added; None stays.

    Args:
        buffer_share: the buffer as a share of max_length; 0: no penalty.
    """
    buffer = buffer_share * max_length
    return [
        None if reward is None else reward + overlong_penalty(len(response.token_ids), max_length, buffer)
        for reward, response in zip(rewards, responses, strict=True)
    ]
