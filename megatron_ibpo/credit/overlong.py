"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13) that keeps right responses above wrong ones."""

import math
from collections.abc import Sequence

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.credit.operator import CreditContext


def overlong_penalty(length: int, max_length: int, buffer: float) -> float:
    """Return between 0 and -1: how far a response of `length` tokens reaches into the last `buffer` tokens
    before `max_length`."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer)) if buffer > 0 else 0.0


def with_overlong_penalty(
    rewards: Sequence[float | None], responses: Sequence[Sample], context: CreditContext
) -> tuple[list[float | None], int]:
    """Return (rewards with the overlong penalty added (--overlong-buffer-share), number of penalties
    limited); None stays None. A response's length is that of the tokens the policy wrote.

    Keep a penalised correct response above every wrong one: its penalty lowers the reward at most to the best
    wrong reward, with that one's own penalty. So a long correct response never pays so much that a wrong one
    of its group, near the mark or with a graded reward, becomes likelier at its expense.

    Args:
        rewards: as they are trained on, bonuses included.
        responses: the responses that are compared with each other.
    """
    limit = context.rollout.rollout_max_response_len
    buffer = context.algorithm.overlong_buffer_share * limit
    if buffer == 0:
        return list(rewards), 0
    pairs = list(zip(rewards, responses, strict=True))
    lowered = [
        None if reward is None else reward + overlong_penalty(response.num_trained_tokens, limit, buffer)
        for reward, response in pairs
    ]
    of_wrong = [
        value
        for value, response in zip(lowered, responses, strict=True)
        if value is not None and not response.correct
    ]
    best_wrong, limited = max(of_wrong, default=-math.inf), 0
    for index, (reward, response) in enumerate(pairs):
        value = lowered[index]
        if reward is not None and value is not None and response.correct:
            least = min(reward, best_wrong)
            limited += value < least
            lowered[index] = max(value, least)
    return lowered, limited
