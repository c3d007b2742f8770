"""Cost of a run in several currencies, so that methods can be compared at the same expense.

All work for an algorithm is counted: sampling of responses and corrections, scoring, forward passes for
log-probs, updates, weight transfer. Observation is not: evaluation, checkpoints, reports, the gradient meter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from megatron_ibpo.basics.records import Group, Sample, TokenIds, TrainSequence, repeated_prefixes
from megatron_ibpo.basics.text import shown
from megatron_ibpo.models import ModelShape, forward_flops
from megatron_ibpo.report.stages import FREE_STAGES

DECODING_PRICE = 10
"""Price of writing a token in prices of reading it, where decoding is counted as dear."""


@dataclass(frozen=True)
class Spent:
    """Cost since the start of training."""

    accelerator_seconds: float = 0.0
    """Seconds of the loop times accelerators held meanwhile (processes, without accelerators)."""
    tokens: float = 0.0
    """Tokens that went through the model, once per pass: prompts read and responses sampled by the engines,
    and all tokens that the trainer computed. The prompt of a group is read once."""
    flops: float = 0.0
    """Floating-point operations of those passes, estimated from the model's shape (`forward_flops`)."""
    tokens_shared_prefixes: float = 0.0
    """The same tokens, with a prefix that several sequences of one pass share counted once, as in engines and
    trainers with a prefix tree."""
    flops_shared_prefixes: float = 0.0
    """The operations of those tokens."""
    flops_decoding: float = 0.0
    """The part of `flops` for writing tokens one by one. An engine that decodes at a tenth of the speed of
    reading pays it ten times."""
    flops_charged: float = 0.0
    """`flops`, and the updates on sequences without an advantage, which are left out; with writing a token as
    DECODING_PRICE times as dear as reading it."""

    @classmethod
    def read(cls, stored: Any) -> "Spent":
        """Read the cost from a run's state. Raises ValueError if the state holds no valid cost."""
        names = {field.name for field in fields(cls)}
        if not isinstance(stored, dict) or not stored.keys() <= names:
            raise ValueError(f"spent must hold {', '.join(sorted(names))}, is {shown(stored)}")
        for name, value in stored.items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"spent: {name} must be a number of at least 0, is {shown(value)}")
        return cls(**stored)

    def metrics(self) -> dict[str, float]:
        """Return the cost for the metrics log."""
        return {f"spent_{name}": value for name, value in asdict(self).items()}

    def amount(self, unit: str) -> float:
        """Return the amount in one currency, named as in --budget-unit."""
        return asdict(self)[unit.replace("-", "_")]


class CostMeter:
    """Adds up the cost of a run."""

    def __init__(
        self,
        shape: ModelShape,
        accelerators: int,
        *,
        recomputes: bool = False,
        epochs: int = 1,
        initial: Spent | None = None,
    ):
        """Start from the cost in `initial`.

        Args:
            accelerators: number that the run holds, engines' own included.
            recomputes: the backward pass repeats the forward pass (full activation recomputation).
            epochs: updates on each sequence, in prices of a sample.
            initial: cost before resuming; None for a new run.
        """
        self._shape = shape
        self._accelerators = accelerators
        self._update_passes = 4.0 if recomputes else 3.0
        self._epochs = epochs
        self.spent = initial or Spent()

    def sampling(self, samples: Iterable[Sample]) -> None:
        """Count samples of the engines."""
        samples = list(samples)
        # a prompt that several samples share is read once
        prompts = list({prompt.tobytes(): prompt for prompt in map(_read, samples)}.values())
        lengths = [len(prompt) for prompt in prompts]
        tokens, flops = sum(lengths), sum(map(self._forward, lengths))
        decoding = 0.0
        repeated = repeated_prefixes(prompts)
        for sample in samples:
            read = len(sample.prompt_token_ids) + sample.num_begun_tokens
            written = len(sample.prompt_token_ids) + len(sample.token_ids) - read
            drafted, accepted = sample.drafts
            operations = self._written(read, written)
            per_token = operations / max(1, written)
            tokens += written + drafted - accepted
            flops += operations + per_token * (drafted - accepted)
            # a step computes what it accepts as a prompt is read
            decoding += operations - per_token * accepted
        repeated_flops = sum(map(self._forward, repeated))
        self._add(tokens, flops, sum(repeated), repeated_flops, decoding)

    def training(
        self,
        forward: Sequence[int],
        updates: Sequence[int],
        repeated_forward: Sequence[int] = (),
        repeated_updates: Sequence[int] = (),
        left_out: Sequence[int] = (),
    ) -> None:
        """Count sequences that the trainer computed, by their lengths in tokens.

        Args:
            forward: forward passes alone, for log-probs.
            updates: with the backward pass, which costs twice the forward pass.
            repeated_forward, repeated_updates: lengths of prefixes that another sequence of the same pass has
                too (`repeated_prefixes`).
            left_out: sequences that no update computed because they have no gradient.
        """
        self._add(
            sum(forward) + sum(updates),
            self._passes(forward, updates),
            sum(repeated_forward) + sum(repeated_updates),
            self._passes(repeated_forward, repeated_updates),
            charged=self._passes((), left_out),
        )

    def correction_price(self, groups: Iterable[Group], sequences: Sequence[TrainSequence]) -> float | None:
        """Return κ: operations of a correction, in operations of a response; None if there are none of
        either. Both include sampling and the update; passes for log-probs, which are the same for both, are
        left out.

        Args:
            sequences: training sequences of the step.
        """
        groups = list(groups)
        responses = [response for group in groups for response in group.responses]
        corrections = [correction.response for group in groups for correction in group.corrections]
        if not responses or not corrections:
            return None

        def mean_operations(samples: Sequence[Sample], kind: str) -> float:
            meter = CostMeter(self._shape, self._accelerators, recomputes=self._update_passes > 3)
            meter.sampling(samples)
            lengths = [sequence.num_tokens for sequence in sequences if sequence.kind == kind]
            meter.training((), lengths * self._epochs)
            return meter.spent.flops / len(samples)

        return mean_operations(corrections, "correction") / mean_operations(responses, "response")

    def of_sample(self, prompt: int, response: int, *, sharing: int = 1, trained: int = 0) -> float:
        """Return the operations of one sample.

        Args:
            prompt, response: tokens read and written.
            sharing: number of samples that share one reading of the prompt.
            trained: tokens of the updates on the sample; 0 without any.
        """
        read = self._forward(prompt) / sharing
        updates = self._epochs * self._update_passes * self._forward(trained)
        return read + self._written(prompt, response) + updates

    def time(self, seconds: Mapping[str, float]) -> None:
        """Count seconds by stage of the loop."""
        counted = sum(value for stage, value in seconds.items() if stage not in FREE_STAGES)
        spent = self.spent.accelerator_seconds + counted * self._accelerators
        self.spent = replace(self.spent, accelerator_seconds=spent)

    def _written(self, read: int, written: int) -> float:
        """Return the operations for sampling tokens one by one after those read."""
        return self._forward(read + written) - self._forward(read)

    def _forward(self, length: int) -> float:
        return forward_flops(self._shape, length)

    def _passes(self, forward: Sequence[int], updates: Sequence[int]) -> float:
        return sum(map(self._forward, forward)) + self._update_passes * sum(map(self._forward, updates))

    def _add(
        self,
        tokens: float,
        flops: float,
        repeated_tokens: float,
        repeated_flops: float,
        decoding: float = 0.0,
        charged: float = 0.0,
    ) -> None:
        spent = self.spent
        self.spent = Spent(
            spent.accelerator_seconds,
            spent.tokens + tokens,
            spent.flops + flops,
            spent.tokens_shared_prefixes + tokens - repeated_tokens,
            spent.flops_shared_prefixes + flops - repeated_flops,
            spent.flops_decoding + decoding,
            spent.flops_charged + flops + (DECODING_PRICE - 1) * decoding + charged,
        )


def _read(sample: Sample) -> TokenIds:
    """Return the tokens before the first sampled one: the prompt, and the given part of the response."""
    num_given = sample.num_begun_tokens
    return np.concatenate([sample.prompt_token_ids, sample.token_ids[:num_given]])
