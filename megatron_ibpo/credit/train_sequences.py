"""Conversion of samples with advantages into the trainer's sequences (ibpo step 11), and corrections that are
trained on as off-policy samples of the plain prompt (--ibpo-plain-prompt).

ŷ was written by a policy that read x̃. Under x alone it is a sample of another distribution, as are the
stronger model's samples in LUFFY (arXiv 2504.14945) and the refinements in Critique-GRPO (arXiv 2506.03106).
It joins the group of x, and the loss takes the shaped surrogate of its tokens (`megatron_ibpo.loss.segments`)
over the whole vocabulary: what top-k and top-p left behind x̃ may lack a token that they would leave behind x.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megatron_ibpo.basics.records import Group, Sample, TrainSequence
from megatron_ibpo.credit.estimators import Advantage, mean_advantage
from megatron_ibpo.credit.operator import TokenWeights
from megatron_ibpo.credit.shaping import counts


def train_sequences(
    group: Group,
    number: int,
    kind: Literal["response", "correction"],
    credited: Iterable[tuple[Sample, float | None, Advantage | None, TokenWeights]],
    weight: float,
) -> list[TrainSequence]:
    """Return the responses or corrections of a group, the `number`-th of the step, as training sequences; a
    correction's prompt is x̃. `credited` has (sample, shaped reward, advantage, token weights) of each.
    Samples are left out if the advantage is None, because the verifier failed, or if they have no trained
    tokens."""
    return [
        TrainSequence(
            prompt_token_ids=sample.prompt_token_ids,
            response_token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            advantage=mean,
            token_advantages=advantage if isinstance(advantage, np.ndarray) else None,
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
            sampling_mask=sample.sampling_mask,
        )
        for index, (sample, reward, advantage, token_weights) in enumerate(credited)
        if (mean := mean_advantage(advantage, sample)) is not None and sample.num_trained_tokens
    ]


def joining_rewards(group: Group, which: Literal["none", "successful", "one"]) -> list[float | None]:
    """Return the reward of every correction that joins the responses and None for the others; empty if none
    may join.

    "successful": corrections that are right and no rewrite. "one": one per group, the first right one, or the
    first of all if none is right. A wrong one is punished if others are right (Critique-GRPO).
    """
    if which == "none":
        return []
    chosen = [c for c in group.corrections if counts(c)]
    if which == "one":
        scored = [c for c in group.corrections if c.response.reward is not None]
        chosen = ([c for c in scored if c.response.correct] or scored)[:1]
    return [c.response.reward if c in chosen else None for c in group.corrections]


def plain_prompt_sequences(
    group: Group,
    number: int,
    rewards: Sequence[float | None],
    advantages: Sequence[Advantage | None],
    weight: float,
) -> list[TrainSequence]:
    """Return the corrections that have an advantage, each behind the prompt that its target was sampled from.
    `number` is the group's index in the step; rewards and advantages are those of every correction."""
    corrections = [correction.response for correction in group.corrections]
    columns = zip(corrections, rewards, advantages, [None] * len(corrections), strict=True)
    return [
        replace(
            sequence,
            prompt_token_ids=group.responses[group.corrections[sequence.index].target].prompt_token_ids,
            off_policy=True,
            # both were recorded behind x̃
            routed_experts=None,
            sampling_mask=None,
        )
        for sequence in train_sequences(group, number, "correction", columns, weight)
    ]
