"""A small weight on wrong responses: in a group that has a correct response, push less against wrong ones.

Our own method, as the control that every finer credit has to beat. Compare W-REINFORCE (arXiv 2506.01347),
which weighs right responses instead, and TOPR (arXiv 2503.14286), which tapers wrong ones by their ratio. It
costs no forward pass: 1.00 times the tokens of GSPO.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import COUNT, NOT_NEGATIVE
from megatron_ibpo.credit.operator import CreditContext, TokenWeights
from megatron_ibpo.credit.token_credit import Advantages, TokenFactors, on_wrong_responses


@dataclass(frozen=True)
class WrongWeight:
    """Weight of --token-credit-weight on every token of a wrong response."""

    token_credit_weight: Annotated[float, NOT_NEGATIVE] = 0.075
    """Factor on the gradient of a wrong response. Tuning chose 0.075 of 0.0375, 0.075 and 0.15 on the tasks
    of the suite (docs/studies.md); 1 changes nothing."""

    def __call__(
        self, groups: Sequence[Group], advantages: Advantages, context: CreditContext
    ) -> TokenFactors:
        def weigh(group: Group, index: int, _: float) -> TokenWeights:
            return np.full(len(group.responses[index].token_ids), self.token_credit_weight)

        return TokenFactors(
            on_wrong_responses(groups, advantages, weigh),
            note="every token of a wrong response beside a right one weighs --token-credit-weight",
        )


@dataclass(frozen=True)
class WrongWeightByLength:
    """Equal weights w/n, up to 1, on the tokens of a wrong response of n trained tokens, so that it counts as
    w tokens."""

    token_credit_tokens: Annotated[int, COUNT] = 2
    """w, number of tokens that a wrong response counts as. 2 was the best of those tried on the tiny
    tasks."""

    def __call__(
        self, groups: Sequence[Group], advantages: Advantages, context: CreditContext
    ) -> TokenFactors:
        def weigh(group: Group, index: int, _: float) -> TokenWeights:
            response = group.responses[index]
            share = self.token_credit_tokens / max(1, response.num_trained_tokens)
            return np.full(len(response.token_ids), min(1.0, share))

        return TokenFactors(
            on_wrong_responses(groups, advantages, weigh),
            note="a wrong response beside a right one counts as --token-credit-tokens tokens",
        )
