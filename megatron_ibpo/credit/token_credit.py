"""The interface for credit of single tokens, on top of the operator's (--token-credit), and its simplest
methods.

A token credit sees the groups of a step once their advantages are known, and gives each response's tokens
factors m_t on their gradient. Ratios, clips, lengths and divisors are unchanged, and all tokens are still
computed. Corrections always have factors of one.

A small weight on wrong responses is our own method, as the control that every finer credit has to beat.
Compare W-REINFORCE (arXiv 2506.01347), which weighs right responses instead, and TOPR (arXiv 2503.14286),
which tapers wrong ones by their ratio.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import COUNT, NOT_NEGATIVE
from megatron_ibpo.credit.operator import CreditContext, Judgement, TokenWeights
from megatron_ibpo.credit.pairing import is_wrong

Advantages = Sequence[Sequence[float | None]]
"""Advantage of every response of every group; None where the verifier failed."""


@dataclass(frozen=True)
class TokenFactors:
    """The result of a token credit."""

    weights: list[list[TokenWeights]]
    """Factors for every response of every group; None: all ones."""
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""
    """Meaning of the factors, shown with a response that has some."""


TokenCredit = Callable[[Sequence[Group], Advantages, CreditContext], TokenFactors]
"""(all groups of the step, their advantages, the context) → factors. It may ask the policy for log-probs, and
keeps no state between calls."""


def uniform(groups: Sequence[Group], advantages: Advantages, context: CreditContext) -> TokenFactors:
    """Weigh all tokens of a response equally."""
    return TokenFactors([[None] * len(group.responses) for group in groups])


def on_wrong_responses(
    groups: Sequence[Group], advantages: Advantages, weigh: Callable[[Group, int, float], TokenWeights]
) -> list[list[TokenWeights]]:
    """Return weigh(group, index, advantage) for every wrong response whose group has a correct one, and all
    ones for the other responses."""

    def of_response(group: Group, index: int, advantage: float | None) -> TokenWeights:
        is_weighed = is_wrong(group.responses[index]) and any(sibling.correct for sibling in group.responses)
        return weigh(group, index, advantage) if is_weighed and advantage is not None else None

    return [
        [of_response(group, index, advantage) for index, advantage in enumerate(of_group)]
        for group, of_group in zip(groups, advantages, strict=True)
    ]


def weigh_tokens(
    groups: Sequence[Group],
    advantages: Advantages,
    judgement: Judgement,
    token_credit: TokenCredit,
    context: CreditContext,
) -> TokenFactors:
    """Return the product of the operator's token weights and the token credit's. Raises ValueError for
    weights that do not fit their response.

    `token_weight_mean` is the mean factor over the trained tokens of responses that have an advantage, and
    `weightless_responses` counts such responses without any gradient left. Both are missing if all factors
    are one.
    """
    credit = token_credit(groups, advantages, context)
    weights: list[list[TokenWeights]] = []
    means: list[tuple[int, float]] = []
    for number, (group, of_group) in enumerate(zip(groups, advantages, strict=True)):
        group_weights = [
            _product(judgement.weights_of(number, index, advantage), credit.weights[number][index])
            for index, advantage in enumerate(of_group)
        ]
        weights.append(group_weights)
        for response, advantage, factors in zip(group.responses, of_group, group_weights, strict=True):
            if factors is not None and factors.shape != response.token_ids.shape:
                raise ValueError(
                    f"token weights of shape {factors.shape} for a response of {len(response.token_ids)} "
                    "tokens: an operator and a token credit give one for each token, the end-of-sequence id "
                    "included"
                )
            if advantage and response.num_trained_tokens:
                mean = 1.0 if factors is None else float(np.mean(factors[response.loss_mask]))
                means.append((response.num_trained_tokens, mean))
    if all(factors is None for group_weights in weights for factors in group_weights):
        return TokenFactors(weights, credit.metrics, credit.note)
    tokens = sum(count for count, _ in means)
    metrics = {"weightless_responses": float(sum(mean == 0 for _, mean in means))}
    if tokens:
        metrics["token_weight_mean"] = sum(count * mean for count, mean in means) / tokens
    return TokenFactors(weights, credit.metrics | metrics, credit.note)


def _product(first: TokenWeights, second: TokenWeights) -> TokenWeights:
    if first is None or second is None:
        return second if first is None else first
    return first * second


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
