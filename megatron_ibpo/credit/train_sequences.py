"""Conversion of samples with advantages into the trainer's sequences (ibpo step 11)."""

from collections.abc import Iterable
from typing import Literal

from megatron_ibpo.basics.records import Group, Sample, TrainSequence
from megatron_ibpo.credit.operator import TokenWeights


def train_sequences(
    group: Group,
    number: int,
    kind: Literal["response", "correction"],
    credited: Iterable[tuple[Sample, float | None, float | None, TokenWeights]],
    weight: float,
) -> list[TrainSequence]:
    """Return the responses or corrections of a group as training sequences; a correction's prompt is x̃.

    Args:
        number: index of the group in the step.
        credited: (sample, shaped reward, advantage, token weights) of each. Samples are left out of training
            if the advantage is None, because the verifier failed, or if they have no trained tokens.
    """
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
            routed_experts=sample.routed_experts,
        )
        for index, (sample, reward, advantage, token_weights) in enumerate(credited)
        if advantage is not None and sample.num_trained_tokens
    ]
