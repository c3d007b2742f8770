"""Counterfactual importance weighting (CIW, arXiv 2602.09331): which steps a response's answer hangs on.

One step at a time is replaced by placeholders; its importance is what the policy's probability of the answer
drops by. Tokens are weighted by the importance of their step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.config import AlgorithmConfig
from megatron_ibpo.credit.advantage import is_degenerate
from megatron_ibpo.credit.operator import Judgement, LogProbQuery, LoopAccess, TokenWeights, lent
from megatron_ibpo.credit.spans import split_spans
from megatron_ibpo.records import Group, Response

__all__ = ["importance_weights", "span_masking"]


@dataclass(frozen=True)
class _Probe:
    """One response and the questions about it."""

    group: int
    place: int
    steps: list[tuple[int, int]]
    """Spans that are masked, one after the other: all but the answer."""
    queries: list[LogProbQuery]
    """The answer as it stands, then with each step masked."""


def span_masking(groups: Sequence[Group], algorithm: AlgorithmConfig, loop: LoopAccess) -> Judgement:
    """Token weights of every response of more than one span, φ = 0. The last span is the response's answer.

    Groups of equal rewards are left out, for they give no gradient. All questions go to the policy at once;
    how many there were is in the metrics.

    Raises:
        ValueError: the loop lends no log-probs, texts of tokens or placeholder.
    """
    ask = lent(loop.logprobs, "the policy's log-probs")
    probes = [
        probe
        for number, group in enumerate(groups)
        if not is_degenerate([response.reward for response in group.responses])
        for place in range(len(group.responses))
        if (probe := _probe(group, number, place, loop)) is not None
    ]
    queries = [query for probe in probes for query in probe.queries]
    answers = iter(ask(queries) if queries else [])
    token_weights: list[list[TokenWeights]] = [[None] * len(group.responses) for group in groups]
    spans = distractors = flat = 0
    for probe in probes:
        whole, *masked = [math.exp(math.fsum(next(answers))) for _ in probe.queries]
        drops = [whole - left for left in masked]
        spans += len(drops)
        distractors += sum(drop < 0 for drop in drops)
        weights = importance_weights(
            groups[probe.group].responses[probe.place], probe.steps, drops, inverted=algorithm.ciw_inverted
        )
        flat += weights is None
        token_weights[probe.group][probe.place] = weights
    metrics = {
        "importance_queries": len(queries),
        "importance_tokens": sum(len(query.context) + len(query.continuation) for query in queries),
        "masked_spans": spans,
        "distractor_spans": distractors,
        "flat_importance": flat,
    }
    phi = [[0.0] * len(group.responses) for group in groups]
    return Judgement(phi, token_weights, {name: float(value) for name, value in metrics.items()})


def importance_weights(
    response: Response, steps: Sequence[tuple[int, int]], drops: Sequence[float], *, inverted: bool
) -> TokenWeights:
    """Weights of a response's tokens from the drops of its steps: of mean 1 over the steps' tokens, and 1 on
    the answer and the end, so of mean 1 over all. None where all steps count the same.

    A drop below 0 (a distractor: the answer is likelier without the step) counts as 0.

    Args:
        inverted: the most important step counts as 0, and the others by what they lack to it: the control.
    """
    importance = [max(0.0, drop) for drop in drops]
    if inverted:
        importance = [max(importance) - value for value in importance]
    lengths = [last - first for first, last in steps]
    total = math.fsum(value * length for value, length in zip(importance, lengths, strict=True))
    if total == 0 or len(set(importance)) == 1:
        return None
    mean = total / sum(lengths)
    weights = [1.0] * len(response.token_ids)
    for (first, last), value in zip(steps, importance, strict=True):
        weights[first:last] = [value / mean] * (last - first)
    return tuple(weights)


def _probe(group: Group, number: int, place: int, loop: LoopAccess) -> _Probe | None:
    response = group.responses[place]
    content = tuple(response.content_ids)
    *steps, answer = split_spans(lent(loop.token_texts, "texts of tokens")(content)) or [(0, 0)]
    if not steps:
        return None
    placeholder = lent(loop.placeholder_id, "a placeholder token")
    prompt = response.prompt_token_ids or group.prompt.token_ids
    reasoning = content[: answer[0]]
    contexts = [(*prompt, *reasoning)]
    for first, last in steps:
        masked = (*reasoning[:first], *(placeholder,) * (last - first), *reasoning[last:])
        contexts.append((*prompt, *masked))
    queries = [
        LogProbQuery(context, content[answer[0] : answer[1]], response.temperature) for context in contexts
    ]
    return _Probe(number, place, steps, queries)
