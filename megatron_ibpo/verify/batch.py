"""A batch as the run makes it, without an engine: its prompts and template, made-up responses of different
lengths, its own operator, estimator, token credit and weights; and what one update of it changes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_ibpo.basics.records import Group, Prompt, Sample, SampleRequest, TrainSequence, token_ids
from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.credit import CreditContext, assign_credit
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.policy.group import Policy
from megatron_ibpo.run.cost import CostMeter
from megatron_ibpo.run.in_one_process import OwnRank, own_trainer
from megatron_ibpo.run.inputs import RunData, open_run_data
from megatron_ibpo.run.resolve import Foundation, read_foundation
from megatron_ibpo.run.state import as_sequence
from megatron_ibpo.verify.rows import NotCheckedError

LONGEST = 40
"""Tokens of the longest made-up response."""
READ_OFF = 1000.0
"""Learning rate with which a step's change of the weights shows its gradient."""
ROUNDING = 2.0**-21
"""Rounding of a float32 weight of size up to 4, twice."""
CLIPS = (-3.0, -0.4, 0.4, 3.0)
"""Distances of the engine's log-probs from the policy's, in clips: the loss clips half of the sequences."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences of a step."""

    groups: list[Group]
    credited: list[TrainSequence]
    """The groups as credit makes sequences of them."""
    credited_reversed: list[TrainSequence]
    """As credit makes them of the groups in the reverse order."""
    sequences: list[TrainSequence]
    """Those to train on: with holes in their loss masks and log-probs near the policy's."""


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
        """Model and method of the small run."""
        return read_foundation(self.small)

    @cached_property
    def data(self) -> RunData:
        """Prompts of the small run."""
        return open_run_data(self.small, self.foundation)

    @cached_property
    def batch(self) -> Batch:
        """A batch with gradients. Reading it raises NotCheckedError if it has none."""
        config, foundation = self.small, self.foundation
        with policy_on_one_rank(config) as (policy, _):
            context = CreditContext(
                config.algorithm, config.rollout, self.data.vocabulary, foundation.max_context,
                config.run.seed, 0, config.data.reward_threshold,
                lambda queries: policy.logprobs([as_sequence(query) for query in queries]),
                policy.values, CostMeter(foundation.shape, 1).of_sample,
            )  # fmt: skip
            groups = list(self._groups(context))
            credited, credited_reversed = (
                assign_credit(ordered, context).sequences for ordered in (groups, groups[::-1])
            )
            if not any(s.has_advantage for s in credited):
                raise NotCheckedError("no sequence of the batch has an advantage")
            holed = [_with_hole(s) if i % 3 == 2 else s for i, s in enumerate(credited)]
            logprobs = policy.logprobs(holed)
        clip = config.loss.eps_clip or 0.05
        near = [of_policy + clip * CLIPS[i % len(CLIPS)] for i, of_policy in enumerate(logprobs)]
        sequences = [
            replace(s, rollout_logprobs=np.where(s.loss_mask, of_engine, 0).astype(np.float32))
            for s, of_engine in zip(holed, near, strict=True)
        ]
        return Batch(groups, credited, credited_reversed, sequences)

    @cached_property
    def uncut(self) -> "Update":
        """One update of the batch in one micro-batch."""
        return self.update(self.batch.sequences)

    def update(self, sequences: Sequence[TrainSequence], most_tokens: int = 10**9) -> "Update":
        """Take one update of the sequences in micro-batches of so many tokens (`update_on_one_rank`)."""
        config = from_engine(self.small)
        cut = replace(config.model, max_tokens_per_gpu=most_tokens, log_probs_max_tokens_per_gpu=None)
        return update_on_one_rank(replace(config, model=cut), sequences)

    def first_prompts(self, count: int) -> list[Prompt]:
        """Return the run's first prompts, with made-up ids for those that an environment writes."""
        assert self.data.prompts is not None  # the small run replays nothing
        return [
            prompt if len(prompt.token_ids) else replace(prompt, token_ids=token_ids([1, 2, 3]))
            for prompt in self.data.prompts.batch(0, count)
        ]

    def _groups(self, context: CreditContext) -> Iterator[Group]:
        """Yield groups of made-up responses, with what the run's operator asks for."""
        rollout, operator = self.small.rollout, self.foundation.method.operator
        rng, count = np.random.default_rng(self.small.run.seed), max(2, rollout.n_samples_per_prompt)
        for prompt in self.first_prompts(rollout.rollout_batch_size):
            prompt = replace(prompt, head_length=prompt.head_length or 1)
            request = SampleRequest(prompt.token_ids, 0, LONGEST, rollout.rollout_temperature)
            group = Group(prompt, [self._sample(request, i, rng) for i in range(count)])
            if prompt.index == 0 and count > 2:  # a response whose verifier failed
                failed = group.responses[-1]
                failed.reward, failed.correct, failed.reward_error = None, False, "made up for this batch"
            follow_ups = operator.follow_ups(group, context)
            samples = [self._sample(follow_up.request, i, rng) for i, follow_up in enumerate(follow_ups)]
            operator.attach(group, follow_ups, samples)
            yield group

    def _sample(self, request: SampleRequest, index: int, rng: np.random.Generator) -> Sample:
        """Return a response of random tokens; every second one is right."""
        longest = min(LONGEST, self.small.rollout.rollout_max_response_len)
        length = int(rng.integers(min(2, longest), longest + 1))
        drawn = rng.integers(1, self.foundation.shape.vocab_size, length)
        ids = token_ids(np.where(drawn == self.data.tokenizer.pad_id, 0, drawn))  # no gradient elsewhere
        correct = index % 2 == 0
        return Sample(
            request.prompt_token_ids, ids, np.full(length, -1.0, np.float32), "length", request.temperature,
            ((0, 0),), np.ones(length, bool), index=index, reward=float(correct), correct=correct,
        )  # fmt: skip


def _with_hole(sequence: TrainSequence) -> TrainSequence:
    """Return the sequence with every fourth token as a tool's, which is read and not trained on."""
    mask = sequence.loss_mask.copy()
    mask[1::4] = False
    return replace(sequence, loss_mask=mask) if mask.any() else sequence


class Update:
    """The effect of one update of all its sequences on the weights, named as in a checkpoint."""

    def __init__(self, initial: Tensors, updated: Tensors, metrics: dict[str, float]) -> None:
        lr = metrics["learning_rate"]
        self.metrics = metrics
        self.change = {name: (initial[name] - updated[name]) / lr for name in initial}
        """How far each weight moved against its gradient, over the learning rate: about the gradient."""
        self.rounding = ROUNDING / lr
        """Rounding of `change`."""


@contextmanager
def policy_on_one_rank(config: Config) -> Iterator[tuple[Policy, Any]]:
    """Provide (the policy on one rank in this process, the rank)."""
    parallel = replace(ParallelConfig(), use_distributed_optimizer=config.parallel.use_distributed_optimizer)
    config = replace(config, parallel=parallel, cluster=replace(config.cluster, num_trainers=1))
    shape = read_hf_config(config.model.hf_dir)
    with own_trainer(config) as rank:
        yield Policy(OwnRank(rank), config, 1, partial(forward_flops, shape)), rank


def update_on_one_rank(config: Config, sequences: Sequence[TrainSequence]) -> Update:
    """Take one update of the sequences in this process, from the initial weights."""
    with policy_on_one_rank(config) as (policy, rank):

        def weights() -> Tensors:
            return {name: tensor.detach().float().cpu().clone() for name, tensor in rank.export}

        initial = weights()
        metrics = policy.update(sequences)
        return Update(initial, weights(), metrics)


def with_lr(config: Config, lr: float = READ_OFF) -> Config:
    """Return the settings of one optimizer step per rollout at a constant learning rate. With READ_OFF the
    step's change of the weights is its gradient, where |g| << 1."""
    optimizer = replace(config.optimizer, lr=lr, lr_decay_style="constant")
    loss = replace(config.loss, num_steps_per_rollout=1, num_epochs_per_rollout=1)
    return replace(config, optimizer=optimizer, loss=loss)


def from_engine(config: Config) -> Config:
    """Return `with_lr` of the settings, with ratios to the engine's log-probs, so that the clip acts in a
    first update. Importance corrections read those already."""
    config = with_lr(config)
    if config.loss.corrections or config.loss.use_routing_replay:
        return config
    return replace(config, loss=replace(config.loss, old_logprobs="engine"))


def weights_in(directory: Path) -> Tensors:
    """Return all tensors of a checkpoint in float32."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def tensor_gaps(tensors: Tensors, expected: Tensors, rounding: float) -> dict[str, float]:
    """Return each tensor's largest difference relative to its own largest value. Tensors within a hundred
    roundings of 0 in both are not compared.

    Raises:
        ValueError: the two do not hold the same tensors.
        NotCheckedError: none is compared.
    """
    if tensors.keys() != expected.keys():
        names = sorted(tensors.keys() ^ expected.keys())
        raise ValueError(f"{len(names)} tensors are on one side only: {', '.join(names[:3])}")
    relative = {}
    for name, reference in expected.items():
        scale = torch.stack([reference, tensors[name]]).abs().max().item()
        if not scale <= 100 * rounding:  # NaN too
            gap = (tensors[name] - reference).abs().max().item() - rounding
            relative[name] = max(gap, 0.0) / scale  # in this order, max keeps a NaN
    if not relative:
        raise NotCheckedError("all tensors are 0, but for rounding")
    return relative
