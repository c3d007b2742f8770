"""Credit by a self-teacher: the policy, shown a right response, tells which tokens of a wrong one it would
not have written. After SDPO (arXiv 2601.20802), with its distillation as a factor on the policy gradient."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megatron_ibpo.basics.records import Group
from megatron_ibpo.basics.seeds import derive_seed
from megatron_ibpo.config import UNIT, Config
from megatron_ibpo.credit.operator import CreditContext, LogProbQuery, TokenWeights, require_tool
from megatron_ibpo.credit.pairing import draw_references, is_wrong
from megatron_ibpo.credit.token_credit import Advantages, TokenFactors


@dataclass(frozen=True)
class SelfTeacher:
    """m_t = 1 + η clip(-a_t, -1, 1) for wrong responses with an advantage and a correct sibling y⁺: a_t = log
    π(y_t | x, y⁺, y_<t) - log π(y_t | x, y_<t). So A_t = A_i m_t.

    y⁺ is drawn among the correct siblings and shown as a correction prompt shows a lone candidate. The first
    term takes a forward pass of about |x| + 2|y| tokens, for all wrong responses at once; the second is the
    engine's log-prob when sampling. A response whose pass would not fit the context keeps factors of one, and
    is counted.

    A call raises ValueError if the context has no log-probs.
    """

    token_credit_eta: Annotated[float, UNIT] = 1.0
    """η: largest deviation of the factors from 1. At most 1, so that no token's advantage changes its sign;
    the source has no such number."""

    def problems(self, config: Config) -> list[str]:
        """Return the settings that this token credit cannot work with."""
        rollout = config.rollout
        top_p = [*rollout.rollout_top_p_cycle, rollout.rollout_top_p]
        top_k = [*rollout.rollout_top_k_cycle, rollout.rollout_top_k]
        if min(top_p) >= 1 and max(top_k) <= 0:
            return []
        return [
            "--token-credit self-teacher: compares the teacher's log-probs with those of sampling, which "
            "--rollout-top-p and --rollout-top-k truncate; sample without them"
        ]

    def __call__(
        self, groups: Sequence[Group], advantages: Advantages, context: CreditContext
    ) -> TokenFactors:
        weights: list[list[TokenWeights]] = [[None] * len(group.responses) for group in groups]
        places = [
            (number, index)
            for number, (group, of_group) in enumerate(zip(groups, advantages, strict=True))
            if any(response.correct for response in group.responses)
            for index, response in enumerate(group.responses)
            if of_group[index] and is_wrong(response)
        ]
        all_queries = {place: _query(groups[place[0]], place[1], context) for place in places}
        fitting = {place: q for place, q in all_queries.items() if _tokens(q) <= context.max_context}
        queries = list(fitting.values())
        logprobs = require_tool(context.logprobs, "the policy's log-probs")(queries) if queries else []
        gaps = []
        for (number, index), response_logprobs in zip(fitting, logprobs, strict=True):
            response = groups[number].responses[index]
            # 0 for tokens that the policy did not write
            gap = np.where(response.loss_mask, response_logprobs.astype(np.float64) - response.logprobs, 0.0)
            weights[number][index] = 1.0 + self.token_credit_eta * np.clip(-gap, -1.0, 1.0)
            gaps += gap[response.loss_mask].tolist()
        metrics = {
            "teacher_tokens": float(sum(map(_tokens, queries))),
            "teacher_skipped": float(len(places) - len(fitting)),
        }
        if gaps:
            metrics["teacher_gap"] = sum(gaps) / len(gaps)
        note = "1 + η clip(a_t), a_t: log-prob here less log-prob beside a right response"
        return TokenFactors(weights, metrics, note)


def _query(group: Group, index: int, context: CreditContext) -> LogProbQuery:
    response = group.responses[index]
    rng = random.Random(derive_seed("teacher", context.seed, context.step, group.prompt.index, index))
    (reference,) = draw_references(index, group.responses, 1, rng)
    prompt_ids = context.vocabulary.correction_prompt(
        group.prompt, group.responses[reference].content_ids, []
    )
    return LogProbQuery(prompt_ids, response.token_ids, response.temperature)


def _tokens(query: LogProbQuery) -> int:
    return len(query.context) + len(query.continuation)
