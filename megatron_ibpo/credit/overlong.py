"""Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), which leaves right above wrong."""

import math
from collections.abc import Sequence

from megatron_ibpo.basics.records import Sample
from megatron_ibpo.credit.operator import CreditContext


def overlong_penalty(length: int, max_length: int, buffer: float) -> float:
    """Between 0 and -1: how far a response of `length` tokens reaches into the last `buffer` tokens before
    `max_length`."""
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer)) if buffer > 0 else 0.0


def with_overlong_penalty(
    rewards: Sequence[float | None], responses: Sequence[Sample], context: CreditContext
) -> tuple[list[float | None], int]:
    """(rewards with the penalty of their response added (--overlong-buffer-share), how many penalties were
    limited); None stays. The length is that of what the policy wrote.

    A penalty puts no correct response below a wrong one that it would else be above: it then takes the
    reward down to the best of the wrong ones, as they are with theirs, and no further. So a long correct
    response never pays so much that a wrong one beside it, near the mark or with a graded reward, is made
    likelier at its expense.

    Args:
        rewards: as they are trained on, bonuses included.
        responses: that are compared with each other.
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
