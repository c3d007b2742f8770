"""Counterfactual importance weighting (CIW, arXiv 2602.09331): which steps a response's answer hangs on.

One step at a time is replaced by placeholders; its importance is what the policy's probability of the answer
drops by. Tokens are weighted by the importance of their step, relative to the mean: so without a floor
rounding errors would make weights of any size where no step matters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_ibpo.basics.records import Group, Sample
from megatron_ibpo.config import Config
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

FLOOR = 0.01
"""Nats. The same answer's log-prob differs by that much between two batches in bfloat16: less is no drop."""


@dataclass(frozen=True, eq=False)
class _Probe:
    """One response and the questions about it."""

    group: int
    index: int
    steps: list[tuple[int, int]]
    """Spans that are masked, one after the other: all but the answer."""
    queries: list[LogProbQuery]
    """The answer as it stands, then with each step masked."""


@dataclass(frozen=True)
class SpanMasking(Operator):
    """Token weights of every response of more than one span, φ = 0. The last span is the response's answer.

    Groups of equal rewards are left out, for they give no gradient. All questions go to the policy at once;
    how many there were is in the metrics.
    """

    ibpo_lambda = 0.0
    ibpo_joint = False

    ciw_inverted: bool = False
    """The control: the less a step matters for the answer, the more its tokens weigh."""
    ciw_placeholder: Literal["pad", "unk"] = "pad"
    """The token that stands for a masked one; "pad" exists in every tokenizer."""

    @property
    def masks_tokens(self) -> bool:
        return True

    def problems(self, config: Config) -> list[str]:
        algorithm = config.algorithm
        if not (algorithm.dynamic_sampling and algorithm.dynamic_sampling_by == "credit"):
            return []
        return [
            "--dynamic-sampling-by credit judges groups while others are sampled, and --ibpo-operator "
            "span-masking asks the policy, which trains; it gives no bonus, so --dynamic-sampling-by rewards "
            "says the same"
        ]

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
            whole, *masked = [math.fsum(next(answers).tolist()) for _ in probe.queries]
            spans += len(masked)
            distractors += sum(left - whole > FLOOR for left in masked)
            response = groups[probe.group].responses[probe.index]
            weights = importance_weights(response, probe.steps, whole, masked, inverted=self.ciw_inverted)
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
    response: Sample,
    steps: Sequence[tuple[int, int]],
    whole: float,
    masked: Sequence[float],
    *,
    inverted: bool,
) -> TokenWeights:
    """Weights of a response's tokens from what the answer's probability drops by without each step: of mean 1
    over the steps' tokens that the policy wrote, and 1 on the answer and the end, so of mean 1 over all. None
    where all steps count the same.

    A drop of at most FLOOR nats counts as 0, and so does one below 0 (a distractor: the answer is likelier
    without the step).

    Args:
        whole: log-prob of the answer.
        masked: the same without each step.
        inverted: the most important step counts as 0, and so does one that comes within FLOOR of it; the
            others count by what they lack to it: the control.
    """
    importance = [math.exp(whole) - math.exp(left) if whole - left > FLOOR else 0.0 for left in masked]
    if inverted:
        most, lowest = max(importance), min(masked)
        importance = [
            most - value if min(left, whole) - lowest > FLOOR else 0.0
            for value, left in zip(importance, masked, strict=True)
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
