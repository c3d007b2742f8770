"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts that all or no responses answer correctly
have no advantage, so others are sampled in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ibpo.records import Group

__all__ = ["fill_batch", "is_informative"]


def is_informative(group: Group) -> bool:
    """Some of the responses are correct and some are not; those that the verifier failed on are neither."""
    return len({response.correct for response in group.responses if response.reward is not None}) == 2


def fill_batch(
    draw: Callable[[int], Sequence[Group]], wanted: int, max_rounds: int
) -> tuple[list[Group], dict[str, float]]:
    """(`wanted` groups, informative ones as far as they were found, what was measured).

    Args:
        draw: scored groups of round 0, 1, …; each round other prompts.
        max_rounds: after these the batch is filled up with the first groups that are not informative, and
            they are counted.
    """
    informative: list[Group] = []
    others: list[Group] = []
    rounds = 0
    while rounds < max_rounds and len(informative) < wanted:
        for group in draw(rounds):
            (informative if is_informative(group) else others).append(group)
        rounds += 1
    missing = max(0, wanted - len(informative))
    discarded = informative[wanted:] + others[missing:]
    metrics = {
        "sampling_rounds": float(rounds),
        "groups_filled_up": float(min(missing, len(others))),
        "groups_discarded": float(len(discarded)),
        "tokens_discarded": float(sum(len(r.token_ids) for group in discarded for r in group.responses)),
    }
    return informative[:wanted] + others[:missing], metrics
