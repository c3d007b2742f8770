"""A batch as the run makes it, without an engine: the run's prompts and template, made-up responses of
different lengths, and the run's own operator, estimator, token credit and weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_ibpo.basics.records import (
    Floats,
    Group,
    Sample,
    SampleRequest,
    TokenIds,
    TrainSequence,
    token_ids,
)
from megatron_ibpo.config import Config
from megatron_ibpo.credit import CreditContext, LogProbQuery, assign_credit
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.run_data import RunData, open_run_data
from megatron_ibpo.run.state import as_sequence
from megatron_ibpo.verify.one_rank import policy_on_one_rank
from megatron_ibpo.verify.rows import NotCheckedError

LONGEST = 40
"""Tokens of the longest made-up response."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a step."""

    sequences: list[TrainSequence]
    """Sequences to train on."""
    credited: list[TrainSequence]
    """The same as credit made them."""
    credited_reversed: list[TrainSequence]
    """As credit makes them of the same groups in the reverse order."""
    unscored: set[tuple[int, str, int]]
    """(index of the prompt, kind, index) of samples whose verifier failed."""


@dataclass(frozen=True)
class Subject:
    """The run under check, and the small run in its place."""

    config: Config
    """The run's own settings."""
    small: Config
    """Settings of the small run (`small_run`)."""
    full: bool = False

    @cached_property
    def foundation(self) -> Foundation:
        return read_foundation(self.small)

    @cached_property
    def data(self) -> RunData:
        """Prompts of the small run."""
        return open_run_data(self.small, self.foundation)

    @cached_property
    def batch(self) -> Batch:
        """A batch with gradients, with holes in its loss masks and log-probs near the policy's."""
        with policy_on_one_rank(self.small) as (policy, _):
            context = _context(self, policy)
            groups = list(_groups(self, context))
            credited = assign_credit(groups, context).sequences
            credited_reversed = assign_credit(groups[::-1], context).sequences
            if not any(s.has_advantage for s in credited):
                raise NotCheckedError("no sequence of the batch has an advantage")
            holed = [_with_hole(s) if i % 3 == 2 else s for i, s in enumerate(credited)]
            near = _with_engine_logprobs(holed, policy.logprobs(holed), self.small.loss.eps_clip or 0.05)
        unscored = {
            (group.prompt.index, "response", index)
            for group in groups
            for index, sample in enumerate(group.responses)
            if sample.reward is None
        }
        return Batch(near, credited, credited_reversed, unscored)

    def prompt_ids(self, count: int) -> list[TokenIds]:
        """Return the ids of the run's first prompts; made-up ids for prompts that an environment writes.

        Raises:
            NotCheckedError: there are no prompts.
        """
        if self.data.prompts is None:
            raise NotCheckedError("the run replays recorded rollouts, which have a batch of their own")
        prompts = self.data.prompts.batch(0, count)
        return [prompt.token_ids if len(prompt.token_ids) else token_ids([1, 2, 3]) for prompt in prompts]

    @property
    def sequences(self) -> list[TrainSequence]:
        return self.batch.sequences


def _context(subject: Subject, policy: Policy) -> CreditContext:
    def logprobs(queries: Sequence[LogProbQuery]) -> list[Floats]:
        return policy.logprobs([as_sequence(query) for query in queries])

    config, data = subject.small, subject.data
    return CreditContext(
        config.algorithm, config.rollout, data.vocabulary, subject.foundation.max_context, config.run.seed, 0,
        config.data.reward_threshold, logprobs, policy.values,
        CostMeter(subject.foundation.shape, 1).of_sample,
    )  # fmt: skip


def _groups(subject: Subject, context: CreditContext) -> Iterator[Group]:
    """Yield groups of made-up responses, with what the run's operator asks for."""
    config, operator = subject.small, subject.foundation.method.operator
    rng = np.random.default_rng(config.run.seed)
    all_ids = subject.prompt_ids(config.rollout.rollout_batch_size)
    assert subject.data.prompts is not None  # prompt_ids has looked
    for prompt, ids in zip(subject.data.prompts.batch(0, len(all_ids)), all_ids, strict=True):
        prompt = replace(prompt, token_ids=ids, head_length=prompt.head_length or 1)
        count = max(2, config.rollout.n_samples_per_prompt)
        request = SampleRequest(prompt.token_ids, 0, LONGEST, config.rollout.rollout_temperature)
        group = Group(prompt, [_sample(request, i, subject, rng) for i in range(count)])
        if prompt.index == 0 and count > 2:
            group.responses[-1] = _unscored(group.responses[-1])
        follow_ups = operator.follow_ups(group, context)
        samples = [_sample(follow_up.request, i, subject, rng) for i, follow_up in enumerate(follow_ups)]
        operator.attach(group, follow_ups, samples)
        yield group


def _sample(request: SampleRequest, index: int, subject: Subject, rng: np.random.Generator) -> Sample:
    """Return a response of random tokens; every second one is right."""
    longest = min(LONGEST, subject.small.rollout.rollout_max_response_len)
    length = int(rng.integers(min(2, longest), longest + 1))
    drawn = rng.integers(1, subject.foundation.shape.vocab_size, length)
    ids = token_ids(np.where(drawn == subject.data.tokenizer.pad_id, 0, drawn))  # no gradient elsewhere
    correct = index % 2 == 0
    return Sample(
        request.prompt_token_ids, ids, np.full(length, -1.0, np.float32), "length", request.temperature,
        ((0, 0),), np.ones(length, bool), index=index, reward=float(correct), correct=correct,
    )  # fmt: skip


def _unscored(sample: Sample) -> Sample:
    """Return the sample as one whose verifier failed."""
    return replace(sample, reward=None, correct=False, reward_error="made up for this batch")


def _with_hole(sequence: TrainSequence) -> TrainSequence:
    """Return the sequence with every fourth token as a tool's, which is read and not trained on."""
    mask = sequence.loss_mask.copy()
    mask[1::4] = False
    return replace(sequence, loss_mask=mask) if mask.any() else sequence


def _with_engine_logprobs(
    sequences: Sequence[TrainSequence], logprobs: Sequence[Floats], clip: float
) -> list[TrainSequence]:
    """Return the sequences with log-probs of an engine so near the policy's that the loss clips some of them
    and not others."""
    shifts = (-3.0, -0.4, 0.4, 3.0)
    return [
        replace(
            s, rollout_logprobs=np.where(s.loss_mask, policy + clip * shifts[i % 4], 0).astype(np.float32)
        )
        for i, (s, policy) in enumerate(zip(sequences, logprobs, strict=True))
    ]
