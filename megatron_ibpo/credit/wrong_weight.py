"""A small weight on wrong responses: in a group that has a correct response, push less against wrong ones.

Ours, as the control that every finer credit has to beat; compare W-REINFORCE (arXiv 2506.01347), which weighs
right responses instead, and TOPR (arXiv 2503.14286), which tapers wrong ones by their ratio. It costs no
forward pass: 1.00 times the tokens of GSPO.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_ibpo.credit.operator import CreditContext, TokenWeights
from megatron_ibpo.credit.pairing import is_wrong
from megatron_ibpo.credit.token_credit import Advantages, TokenFactors
from megatron_ibpo.records import Group, Sample


def wrong_weight(groups: Sequence[Group], advantages: Advantages, context: CreditContext) -> TokenFactors:
    """Every token of a wrong response counts --token-credit-weight."""
    factor = context.algorithm.token_credit_weight
    return _weighed(groups, lambda response: factor)


def wrong_weight_by_length(
    groups: Sequence[Group], advantages: Advantages, context: CreditContext
) -> TokenFactors:
    """A wrong response of n trained tokens counts as --token-credit-tokens of them: w/n each, up to 1."""
    tokens = context.algorithm.token_credit_tokens
    return _weighed(groups, lambda response: min(1.0, tokens / max(1, response.num_trained_tokens)))


def _weighed(groups: Sequence[Group], factor: Callable[[Sample], float]) -> TokenFactors:
    def of_response(group: Group, response: Sample) -> TokenWeights:
        if not is_wrong(response) or not any(other.correct for other in group.responses):
            return None
        return np.full(len(response.token_ids), factor(response))

    return TokenFactors([[of_response(group, response) for response in group.responses] for group in groups])
