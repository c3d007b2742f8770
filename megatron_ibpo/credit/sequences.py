"""From advantages to what the trainer gets (ibpo step 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ibpo.credit.operator import TokenWeights
from megatron_ibpo.records import Group, Sample, TrainSequence

__all__ = ["Credited", "correction_sequences", "response_sequences"]


@dataclass(frozen=True, eq=False)
class Credited:
    """What credit made of the samples of a group that are compared: each list one entry per sample."""

    rewards: list[float | None]
    """Shaped; None: the verifier failed, and the sample is left out of training."""
    advantages: list[float | None]
    """None where the reward is."""
    token_weights: Sequence[TokenWeights]


def response_sequences(group: Group, number: int, credited: Credited, weight: float) -> list[TrainSequence]:
    """The responses of a group as training sequences.

    Args:
        number: index of the group in the step.
    """
    return _sequences(group, number, group.responses, credited, weight, "response")


def correction_sequences(group: Group, number: int, credited: Credited, weight: float) -> list[TrainSequence]:
    """The corrections of a group as training sequences: prompt x̃, response ŷ."""
    samples = [correction.response for correction in group.corrections]
    return _sequences(group, number, samples, credited, weight, "correction")


def _sequences(
    group: Group,
    number: int,
    samples: Sequence[Sample],
    credited: Credited,
    weight: float,
    kind: Literal["response", "correction"],
) -> list[TrainSequence]:
    columns = zip(samples, credited.rewards, credited.advantages, credited.token_weights, strict=True)
    return [
        TrainSequence(
            prompt_token_ids=sample.prompt_token_ids,
            response_token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            advantage=advantage,
            weight=weight,
            prompt_index=group.prompt.index,
            group=number,
            index=index,
            kind=kind,
            temperature=sample.temperature,
            reward=reward,
            rollout_logprobs=sample.logprobs,
            token_weights=token_weights,
        )
        for index, (sample, reward, advantage, token_weights) in enumerate(columns)
        if advantage is not None and sample.num_trained_tokens
    ]
