"""Credit for near misses: Δ of a correction, and the shaped reward r' = r + λΔ (ibpo steps 7 and 8)."""

from collections.abc import Sequence

from megatron_ibpo.basics.records import Correction, Group
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
