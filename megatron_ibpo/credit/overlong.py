"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13)."""

from collections.abc import Iterable, Sequence

from megatron_ibpo.credit.operator import CreditContext
from megatron_ibpo.records import Sample


def overlong_penalty(length: int, max_length: int, buffer: float) -> float:
    """Between 0 and -1: how far a response of `length` tokens reaches into the last `buffer` tokens before
    `max_length`."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer)) if buffer > 0 else 0.0


def with_overlong_penalty(
    rewards: Sequence[float | None], responses: Iterable[Sample], context: CreditContext
) -> list[float | None]:
    """Rewards with the penalty of their response added (--overlong-buffer-share); None stays. The length is
    that of what the policy wrote."""
    limit = context.rollout.rollout_max_response_len
    buffer = context.algorithm.overlong_buffer_share * limit
    if buffer == 0:
        return list(rewards)
    return [
        None if reward is None else reward + overlong_penalty(response.num_trained_tokens, limit, buffer)
        for reward, response in zip(rewards, responses, strict=True)
    ]
