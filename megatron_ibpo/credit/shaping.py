"""Shaping of rewards: Δ of a correction and r' = r + λΔ for near misses (ibpo steps 7 and 8), and the soft
overlong punishment (DAPO, arXiv 2503.14476, eq. 13), which keeps right responses above wrong ones."""

import math
from collections.abc import Sequence

from megatron_ibpo.basics.records import Correction, Group, Sample
from megatron_ibpo.credit.operator import CreditContext
from megatron_ibpo.credit.pairing import is_wrong


def counts(correction: Correction) -> bool:
    """Return whether the correction shows that its target was nearly right: it is right, and no rewrite."""
    return correction.response.correct and not correction.rewritten


def correction_bonus(group: Group, beta: float | None) -> list[float]:
    """Return Δ of every response: the mean over its corrections of β, or of the share of tokens that the
    correction keeps if β is None. Corrections that do not count contribute 0.

    Corrections whose verifier failed are left out of the mean. A response without corrections has Δ = 0; a
    failed correction costs nothing.
    """
    earned: list[list[float]] = [[] for _ in group.responses]
    for correction in group.corrections:
        if correction.response.reward is not None:
            worth = correction.unmodified_share if beta is None else beta
            earned[correction.target].append(worth if counts(correction) else 0.0)
    return [sum(values) / len(values) if values else 0.0 for values in earned]


def shaped_rewards(
    group: Group, phi: Sequence[float], shaping_weight: float, reward_threshold: float
) -> tuple[list[float | None], int]:
    """Return (r' = r + λφ of every response, bonuses withheld); None where the verifier failed.

    A wrong response whose graded reward plus bonus would reach the smallest correct reward gets no bonus, and
    is counted.

    Raises:
        ValueError: φ outside [0, 1], or above 0 for a response that is not wrong.
    """
    shaped: list[float | None] = []
    withheld = 0
    for response, bonus in zip(group.responses, phi, strict=True):
        if not 0 <= bonus <= 1 or (bonus > 0 and not is_wrong(response)):
            raise ValueError(
                f"the operator gave φ={bonus} to a response with reward {response.reward}: φ lies in [0, 1] "
                "and is above 0 for wrong responses only"
            )
        if response.reward is None:
            shaped.append(None)
            continue
        value = response.reward + shaping_weight * bonus
        if bonus > 0 and value >= reward_threshold:
            value = response.reward
            withheld += 1
        shaped.append(value)
    return shaped, withheld


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
