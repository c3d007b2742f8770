"""Reset groups: where a wrong response leaves a right one, the policy continues from there several times.

--ibpo-operator examples/credit/resets.py:ResetGroups. It shows a method that requests samples of its own and
compares them with each other.

y_i[:f_i] is the prefix that a wrong response shares with the correct sibling that it follows longest. K
suffixes are drawn from it. Each has the advantage r_k less the mean of the K, on its own tokens alone: this
compares only what the policy did from that place on. Monte-Carlo values of prefixes are as in VinePPO (arXiv
2410.01679) and SPO (arXiv 2505.23564), taken at one place; resets as in RRPO (arXiv 2605.25507) and DEEP-GRPO
(arXiv 2602.14169).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megatron_ibpo.basics.records import Group, SampleRequest
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import NOT_NEGATIVE, within
from megatron_ibpo.credit import CreditContext, FollowUp, Judgement, Operator
from megatron_ibpo.credit.divergence import shared_tokens
from megatron_ibpo.credit.estimators import group_mean
from megatron_ibpo.credit.operator import no_phi
from megatron_ibpo.credit.pairing import is_wrong
from megatron_ibpo.credit.shaping import degenerate_correction_groups


@dataclass(frozen=True)
class ResetGroups(Operator):
    """Reset groups: K = --ibpo-corrections suffixes of every wrong response that has a correct sibling. φ =
    0."""

    ibpo_lambda = 0.0
    ibpo_correction_group = "pair"

    ibpo_corrections: Annotated[int, within(2, 1024, "they are compared with each other")] = 2
    """K: suffixes sampled for each wrong response."""
    ibpo_correction_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of a suffix relative to a response."""

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """Return K requests for each such response. A response that leaves no room after the shared prefix is
        counted in `group.skipped_pairs`."""
        correct = [response for response in group.responses if response.correct]
        follow_ups: list[FollowUp] = []
        group.skipped_pairs = 0
        for target, response in enumerate(group.responses):
            if not correct or not is_wrong(response):
                continue
            num_shared = shared_tokens(response, correct)
            room = context.rollout.rollout_max_response_len - num_shared
            if num_shared == len(response.token_ids) or room < 1:
                group.skipped_pairs += 1
                continue
            follow_ups += [
                FollowUp(target, (), _request(group, target, num_shared, number, context))
                for number in range(self.ibpo_corrections)
            ]
        return follow_ups

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Give responses no φ; the suffixes of one response are compared by their mean, with metrics of their
        success."""
        suffixes = [correction.response for group in groups for correction in group.corrections]
        scored = [suffix for suffix in suffixes if suffix.reward is not None]
        metrics = {
            "reset_suffixes": float(len(suffixes)),
            "reset_reward_errors": float(len(suffixes) - len(scored)),
            "tokens_reset_suffixes": float(sum(suffix.num_trained_tokens for suffix in suffixes)),
            "skipped_pairs": float(sum(group.skipped_pairs for group in groups)),
            "degenerate_correction_groups": float(
                sum(degenerate_correction_groups(group, self, context) for group in groups)
            ),
        }
        if scored:
            metrics["reset_success"] = sum(suffix.correct for suffix in scored) / len(scored)
        if suffixes:
            num_shared = sum(suffix.num_begun_tokens for suffix in suffixes)
            metrics["reset_shared_length"] = num_shared / len(suffixes)
        return Judgement(no_phi(groups), metrics=metrics, follow_up_estimator=group_mean)


def _request(
    group: Group, target: int, num_shared: int, number: int, context: CreditContext
) -> SampleRequest:
    response, rollout = group.responses[target], context.rollout
    return SampleRequest(
        np.concatenate([response.prompt_token_ids, response.token_ids[:num_shared]]),
        derive_seed("reset", context.seed, context.step, group.prompt.index, target, number),
        rollout.rollout_max_response_len - num_shared,
        response.temperature,
        rollout.rollout_top_p,
        rollout.rollout_top_k,
        num_shared,
    )
