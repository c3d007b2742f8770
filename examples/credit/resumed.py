"""Corrections that resume a wrong response where it parts from the reference, trained under the plain prompt.

--ibpo-operator examples/credit/resumed.py:Resumed, as in examples/algorithms/ibpo_resumed.yaml. The policy
sees both solutions, but its correction already begins with the wrong response up to the first token that
the canonical alignment with the reference does not keep. Only what follows is written, and only that is
trained on. It shows how a method asks for part of a response.

Where the errors of long responses come late, this writes a fraction of what a whole correction does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from megatron_ibpo.basics.records import Group
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import NOT_NEGATIVE, Config
from megatron_ibpo.credit import CreditContext, FollowUp, Judgement
from megatron_ibpo.credit.corrections import CompareAndCorrect
from megatron_ibpo.credit.operator import no_phi
from megatron_ibpo.edit_distance import unmodified_mask


@dataclass(frozen=True)
class Resumed(CompareAndCorrect):
    """Compare-and-correct, with its parameters, from the place where the wrong response goes another way."""

    ibpo_lambda: Annotated[float, NOT_NEGATIVE] = 0.0
    ibpo_joint: bool = False
    ibpo_plain_prompt: Literal["none", "successful", "one"] = "successful"
    ibpo_resume_at: Literal["parting", "random"] = "parting"
    """Place where a correction resumes the wrong response. "parting": the first token that its alignment with
    the reference changes. "random": any token, as a control."""

    def problems(self, config: Config) -> list[str]:
        """Refuse what compare-and-correct refuses, and what has no effect here: nothing compares these
        corrections with their targets."""
        problems = super().problems(config)
        if self.ibpo_lambda > 0:
            problems.append("--ibpo-lambda: a resumed correction is no rewrite and earns no bonus; use 0")
        if self.ibpo_variant != "base" or self.ibpo_rewrite_penalty > 0:
            problems.append(
                "--ibpo-variant and --ibpo-rewrite-penalty: a resumed correction has no mask and is no "
                "rewrite; leave them out"
            )
        return problems

    def follow_ups(self, group: Group, context: CreditContext) -> list[FollowUp]:
        """Return requests that continue the wrong response, with the beginning in the prompt."""
        follow_ups = []
        for follow_up in super().follow_ups(group, context):
            begun = group.responses[follow_up.target].token_ids[: self._place(follow_up, group, context)]
            request = follow_up.request
            request = replace(
                request,
                prompt_token_ids=np.concatenate([request.prompt_token_ids, begun]),
                max_tokens=request.max_tokens - len(begun),
                num_begun_tokens=len(begun),
            )
            follow_ups.append(replace(follow_up, request=request))
        return follow_ups

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Give no φ, and measure how often corrections succeed and how much of them was written."""
        corrections = [correction.response for group in groups for correction in group.corrections]
        scored = [correction for correction in corrections if correction.reward is not None]
        metrics = {
            "corrections": float(len(corrections)),
            "correction_reward_errors": float(len(corrections) - len(scored)),
            "tokens_corrections": float(sum(correction.num_trained_tokens for correction in corrections)),
            "skipped_pairs": float(sum(group.skipped_pairs for group in groups)),
        }
        if scored:
            metrics["correction_success"] = sum(correction.correct for correction in scored) / len(scored)
        if corrections:
            num_begun = sum(correction.num_begun_tokens for correction in corrections)
            metrics["correction_begun_length"] = num_begun / len(corrections)
        return Judgement(no_phi(groups), metrics=metrics)

    def _place(self, follow_up: FollowUp, group: Group, context: CreditContext) -> int:
        """Return the number of tokens of the wrong response that its correction begins with. A response that
        equals its reference, or has none, is corrected from its first token."""
        content = group.responses[follow_up.target].content_ids
        if self.ibpo_resume_at == "random":
            number = follow_up.request.seed
            return random.Random(derive_seed("resume", context.seed, number)).randrange(max(1, len(content)))
        if not follow_up.references:
            return 0
        reference = group.responses[follow_up.references[0]].content_ids
        flags, _ = unmodified_mask([content], None, [reference], None)
        changed = np.flatnonzero(flags == 0)
        return int(changed[0]) if len(changed) else 0
