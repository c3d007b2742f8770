"""From advantages to what the trainer gets (ibpo step 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_ibpo.records import Group, Response, TrainSequence

__all__ = ["correction_sequences", "response_sequences"]


def response_sequences(
    group: Group,
    number: int,
    advantages: Sequence[float | None],
    token_weights: Sequence[tuple[float, ...] | None],
    weight: float,
) -> list[TrainSequence]:
    """The responses of a group as training sequences.

    Args:
        number: the group's place in the step.
        advantages: None leaves a response out (the verifier failed on it).
        token_weights: of each response, None for all ones.
    """
    return [
        _sequence(
            response.prompt_token_ids or group.prompt.token_ids,
            response,
            advantage,
            weight,
            number,
            "response",
            factors,
        )
        for response, advantage, factors in zip(group.responses, advantages, token_weights, strict=True)
        if advantage is not None and response.token_ids
    ]


def correction_sequences(
    group: Group, number: int, advantages: Sequence[float | None], weight: float
) -> list[TrainSequence]:
    """The corrections of a group as training sequences: prompt x̃, response ŷ."""
    return [
        _sequence(correction.prompt_token_ids, correction.response, advantage, weight, number, "correction")
        for correction, advantage in zip(group.corrections, advantages, strict=True)
        if advantage is not None and correction.response.token_ids
    ]


def _sequence(
    prompt_ids: tuple[int, ...],
    response: Response,
    advantage: float,
    weight: float,
    group: int,
    kind: Literal["response", "correction"],
    token_weights: tuple[float, ...] | None = None,
) -> TrainSequence:
    return TrainSequence(
        prompt_token_ids=prompt_ids,
        response_token_ids=tuple(response.token_ids),
        advantage=advantage,
        weight=weight,
        group=group,
        kind=kind,
        temperature=response.temperature,
        rollout_logprobs=tuple(response.logprobs),
        token_weights=token_weights,
    )
