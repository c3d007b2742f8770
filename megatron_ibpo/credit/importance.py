"""Counterfactual importance weighting (CIW, arXiv 2602.09331): which steps a response's answer hangs on.

One step at a time is replaced by placeholders; its importance is what the policy's probability of the answer
drops by. Tokens are weighted by the importance of their step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ibpo.credit.estimators import is_degenerate
from megatron_ibpo.credit.operator import (
    CreditContext,
    Judgement,
    LogProbQuery,
    Operator,
    TokenWeights,
    Vocabulary,
    lent,
    no_phi,
)
from megatron_ibpo.credit.spans import written_spans
from megatron_ibpo.records import Group, Sample


@dataclass(frozen=True, eq=False)
class _Probe:
    """One response and the questions about it."""

    group: int
    index: int
    steps: list[tuple[int, int]]
    """Spans that are masked, one after the other: all but the answer."""
    queries: list[LogProbQuery]
    """The answer as it stands, then with each step masked."""


class SpanMasking(Operator):
    """Token weights of every response of more than one span, φ = 0. The last span is the response's answer.

    Groups of equal rewards are left out, for they give no gradient. All questions go to the policy at once;
    how many there were is in the metrics.
    """

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """
        Raises:
            ValueError: the context has no log-probs, texts of tokens or placeholder.
        """
        ask = lent(context.logprobs, "the policy's log-probs")
        probes = [
            probe
            for number, group in enumerate(groups)
            if not is_degenerate([response.reward for response in group.responses])
            for index in range(len(group.responses))
            if (probe := _probe(group, number, index, context.vocabulary)) is not None
        ]
        queries = [query for probe in probes for query in probe.queries]
        answers = iter(ask(queries) if queries else [])
        token_weights: list[list[TokenWeights]] = [[None] * len(group.responses) for group in groups]
        spans = distractors = flat = 0
        for probe in probes:
            whole, *masked = [math.exp(math.fsum(next(answers).tolist())) for _ in probe.queries]
            drops = [whole - left for left in masked]
            spans += len(drops)
            distractors += sum(drop < 0 for drop in drops)
            response = groups[probe.group].responses[probe.index]
            weights = importance_weights(
                response, probe.steps, drops, inverted=context.algorithm.ciw_inverted
            )
            flat += weights is None
            token_weights[probe.group][probe.index] = weights
        metrics = {
            "importance_queries": len(queries),
            "importance_tokens": sum(len(query.context) + len(query.continuation) for query in queries),
            "masked_spans": spans,
            "distractor_spans": distractors,
            "flat_importance": flat,
        }
        return Judgement(
            no_phi(groups), token_weights, {name: float(value) for name, value in metrics.items()}
        )


def importance_weights(
    response: Sample, steps: Sequence[tuple[int, int]], drops: Sequence[float], *, inverted: bool
) -> TokenWeights:
    """Weights of a response's tokens from the drops of its steps: of mean 1 over the steps' tokens that the
    policy wrote, and 1 on the answer and the end, so of mean 1 over all. None where all steps count the same.

    A drop below 0 (a distractor: the answer is likelier without the step) counts as 0.

    Args:
        inverted: the most important step counts as 0, and the others by what they lack to it: the control.
    """
    importance = [max(0.0, drop) for drop in drops]
    if inverted:
        importance = [max(importance) - value for value in importance]
    lengths = [int(np.count_nonzero(response.loss_mask[first:last])) for first, last in steps]
    total = math.fsum(value * length for value, length in zip(importance, lengths, strict=True))
    if total == 0 or len(set(importance)) == 1:
        return None
    mean = total / sum(lengths)
    weights = np.ones(len(response.token_ids))
    for (first, last), value in zip(steps, importance, strict=True):
        weights[first:last] = value / mean
    return weights


def _probe(group: Group, number: int, index: int, vocabulary: Vocabulary) -> _Probe | None:
    response = group.responses[index]
    spans = written_spans(response, lent(vocabulary.token_texts, "texts of tokens"))
    if len(spans) < 2:
        return None
    *steps, (answer, end) = spans
    placeholder = lent(vocabulary.placeholder_id, "a placeholder token")
    reasoning = response.token_ids[:answer]
    masked = []
    for first, last in steps:
        without = reasoning.copy()
        without[first:last] = placeholder
        masked.append(without)
    queries = [
        LogProbQuery(
            np.concatenate([response.prompt_token_ids, shown]),
            response.token_ids[answer:end],
            response.temperature,
        )
        for shown in (reasoning, *masked)
    ]
    return _Probe(number, index, steps, queries)
