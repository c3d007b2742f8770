"""A small weight on wrong responses: in a group that has a correct response, push less against wrong ones.

Ours, as the control that every finer credit has to beat; compare W-REINFORCE (arXiv 2506.01347), which weighs
right responses instead, and TOPR (arXiv 2503.14286), which tapers wrong ones by their ratio. It costs no
forward pass: 1.00 times the tokens of GSPO.
"""

from collections.abc import Sequence

import numpy as np

from megatron_ibpo.basics.records import Group
from megatron_ibpo.credit.operator import CreditContext, TokenWeights
from megatron_ibpo.credit.token_credit import Advantages, TokenFactors, on_wrong_responses


def wrong_weight(groups: Sequence[Group], advantages: Advantages, context: CreditContext) -> TokenFactors:
    """Every token of a wrong response counts --token-credit-weight."""

    def weigh(group: Group, index: int, _: float) -> TokenWeights:
        return np.full(len(group.responses[index].token_ids), context.algorithm.token_credit_weight)

    return TokenFactors(on_wrong_responses(groups, advantages, weigh))


def wrong_weight_by_length(
    groups: Sequence[Group], advantages: Advantages, context: CreditContext
) -> TokenFactors:
    """A wrong response of n trained tokens counts as --token-credit-tokens of them: w/n each, up to 1."""

    def weigh(group: Group, index: int, _: float) -> TokenWeights:
        response = group.responses[index]
        share = context.algorithm.token_credit_tokens / max(1, response.num_trained_tokens)
        return np.full(len(response.token_ids), min(1.0, share))

    return TokenFactors(on_wrong_responses(groups, advantages, weigh))
