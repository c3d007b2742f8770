"""Counterfactual importance weighting (CIW, arXiv 2602.09331) of the steps on which a response's answer
depends. One step at a time is replaced by placeholders; its importance is the drop in the policy's
probability of the answer. Tokens are weighted by the importance of their step, relative to the mean, so
without a floor rounding errors would become weights of any size where no step matters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_ibpo.basics.records import Group, Sample
from megatron_ibpo.basics.text import listed
from megatron_ibpo.config import Config
from megatron_ibpo.credit.estimators import is_degenerate
from megatron_ibpo.credit.explanation import Line, number
from megatron_ibpo.credit.operator import (
    CreditContext,
    Judgement,
    LogProbQuery,
    Operator,
    TokenWeights,
    Vocabulary,
    no_phi,
    require_tool,
)
from megatron_ibpo.credit.pairing import written_spans

FLOOR = 0.01
"""Smallest drop that counts, in nats: the log-prob of the same answer differs by this much between two
batches in bfloat16."""
_MOST_NAMED = 20
"""Steps of a response whose importance is told in words; the tokens' weights tell of all."""


@dataclass(frozen=True, eq=False)
class _Probe:
    """One response and the queries about it."""

    group: int
    index: int
    steps: list[tuple[int, int]]
    """Spans to mask, one at a time: all but the answer."""
    queries: list[LogProbQuery]
    """Queries for the answer as it stands, then with each step masked."""


@dataclass(frozen=True)
class SpanMasking(Operator):
    """Token weights of every response of more than one span, φ = 0. The last span is the response's answer.

    Groups of equal rewards are skipped, since they give no gradient. All queries go to the policy at once;
    their number is in the metrics.
    """

    ibpo_lambda = 0.0
    ibpo_joint = False

    ciw_inverted: bool = False
    """Give more weight to tokens of steps that matter less for the answer, as a control."""
    ciw_placeholder: Literal["pad", "unk"] = "pad"
    """Token that stands for a masked one; "pad" exists in every tokenizer."""

    @property
    def masks_tokens(self) -> bool:
        return True

    def problems(self, config: Config) -> list[str]:
        algorithm = config.algorithm
        if not (algorithm.dynamic_sampling and algorithm.dynamic_sampling_by == "credit"):
            return []
        return [
            "--dynamic-sampling-by credit judges groups during sampling, when --ibpo-operator "
            "span-masking cannot use the policy; it gives no bonus, so --dynamic-sampling-by rewards "
            "chooses the same groups"
        ]

    def judge(self, groups: Sequence[Group], context: CreditContext) -> Judgement:
        """Judge the groups by the probability of each answer with one step masked at a time. Raises
        ValueError if the context has no log-probs, texts of tokens or placeholder."""
        ask = require_tool(context.logprobs, "the policy's log-probs")
        probes = [
            probe
            for number, group in enumerate(groups)
            if not is_degenerate([response.reward for response in group.responses])
            for index in range(len(group.responses))
            if (probe := _probe(group, number, index, context.vocabulary)) is not None
        ]
        queries = [query for probe in probes for query in probe.queries]
        logprobs_of_queries = iter(ask(queries) if queries else [])
        token_weights: list[list[TokenWeights]] = [[None] * len(group.responses) for group in groups]
        explanations: list[list[list[Line]]] = [[[] for _ in group.responses] for group in groups]
        spans = distractors = flat = 0
        for probe in probes:
            unmasked, *masked = [math.fsum(next(logprobs_of_queries).tolist()) for _ in probe.queries]
            spans += len(masked)
            distractors += sum(logprob - unmasked > FLOOR for logprob in masked)
            response = groups[probe.group].responses[probe.index]
            weights = importance_weights(response, probe.steps, unmasked, masked, inverted=self.ciw_inverted)
            flat += weights is None
            token_weights[probe.group][probe.index] = weights
            explanations[probe.group][probe.index] = [_explained(probe.steps, unmasked, masked)]
        metrics = {
            "importance_queries": len(queries),
            "importance_tokens": sum(len(query.context) + len(query.continuation) for query in queries),
            "masked_spans": spans,
            "distractor_spans": distractors,
            "flat_importance": flat,
        }
        return Judgement(
            no_phi(groups),
            token_weights,
            {name: float(value) for name, value in metrics.items()},
            explanations=explanations,
        )


def importance_weights(
    response: Sample,
    steps: Sequence[tuple[int, int]],
    unmasked: float,
    masked: Sequence[float],
    *,
    inverted: bool,
) -> TokenWeights:
    """Return weights of a response's tokens from the drop in the answer's probability without each step.
    Their mean over the steps' tokens that the policy wrote is 1, and the answer and the end weigh 1, so the
    mean over all is 1. None where all steps count the same.

    A drop of at most FLOOR nats counts as 0, and so does a negative one (a distractor: the answer is likelier
    without the step).

    Args:
        unmasked: log-prob of the answer.
        masked: log-prob of the answer without each step.
        inverted: as a control, count each step by its distance from the most important one; that step, and
            any within FLOOR of it, count as 0.
    """
    importance = [
        math.exp(unmasked) - math.exp(score) if unmasked - score > FLOOR else 0.0 for score in masked
    ]
    if inverted:
        largest, lowest = max(importance), min(masked)
        importance = [
            largest - value if min(logprob, unmasked) - lowest > FLOOR else 0.0
            for value, logprob in zip(importance, masked, strict=True)
        ]
    lengths = [int(np.count_nonzero(response.loss_mask[first:last])) for first, last in steps]
    total = math.fsum(value * length for value, length in zip(importance, lengths, strict=True))
    if total == 0 or len(set(importance)) == 1:
        return None
    mean = total / sum(lengths)
    weights = np.ones(len(response.token_ids))
    for (first, last), value in zip(steps, importance, strict=True):
        weights[first:last] = value / mean
    return weights


def _explained(steps: Sequence[tuple[int, int]], unmasked: float, masked: Sequence[float]) -> Line:
    """Return the probability of the answer, as it stands and without each step."""
    without = [
        f"tokens {first + 1} to {last}: {number(math.exp(logprob))}"
        for (first, last), logprob in zip(steps, masked, strict=True)
    ]
    return Line(
        "probability of the answer", math.exp(unmasked), note=f"without {listed(without, most=_MOST_NAMED)}"
    )


def _probe(group: Group, number: int, index: int, vocabulary: Vocabulary) -> _Probe | None:
    response = group.responses[index]
    spans = written_spans(response, require_tool(vocabulary.token_texts, "texts of tokens"))
    if len(spans) < 2:
        return None
    *steps, (answer, end) = spans
    placeholder = require_tool(vocabulary.placeholder_id, "a placeholder token")
    reasoning = response.token_ids[:answer]
    masked = []
    for first, last in steps:
        without = reasoning.copy()
        without[first:last] = placeholder
        masked.append(without)
    queries = [
        LogProbQuery(
            np.concatenate([response.prompt_token_ids, text]),
            response.token_ids[answer:end],
            response.temperature,
        )
        for text in (reasoning, *masked)
    ]
    return _Probe(number, index, steps, queries)
