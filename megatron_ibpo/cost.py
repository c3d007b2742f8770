"""What a run has spent, in three currencies, so that methods can be compared at the same expense.

Everything that an algorithm asks for is counted: sampling of responses and corrections, scoring, forward
passes for log-probs, updates, weight transfer. What only observes is not: evaluation, checkpoints, reports,
the gradient meter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from megatron_ibpo.records import Sample, SampleRequest
from megatron_ibpo.shape import ModelShape

__all__ = ["FREE_STAGES", "CostMeter", "Spent", "forward_flops"]

FREE_STAGES = frozenset({"start", "evaluate", "save", "report", "record", "check weights", "gradient meter"})
"""Stages of the loop that observe and do not train."""


@dataclass(frozen=True)
class Spent:
    """What was spent since the start of training."""

    accelerator_seconds: float = 0.0
    """Seconds of the loop times accelerators held meanwhile (processes, where there are none)."""
    tokens: float = 0.0
    """Tokens that went through the model, each once for every pass: prompts read and responses sampled by
    the engines, and all that the trainer computed. The prompt of a group is read once."""
    flops: float = 0.0
    """Floating-point operations of those passes, estimated from the model's shape (`forward_flops`)."""

    def metrics(self) -> dict[str, float]:
        """For the metrics log."""
        return {f"spent_{name}": value for name, value in asdict(self).items()}

    def of(self, unit: str) -> float:
        """The amount in one currency: accelerator-seconds, tokens or flops."""
        return asdict(self)[unit.replace("-", "_")]


class CostMeter:
    """Adds up what a run spends."""

    def __init__(
        self, shape: ModelShape, accelerators: int, *, recomputes: bool = False, before: Spent | None = None
    ):
        """
        Args:
            accelerators: that the run holds, engines' own included.
            recomputes: the backward pass repeats the forward pass (full activation recomputation).
            before: what a resumed run had spent.
        """
        self._shape = shape
        self._accelerators = accelerators
        self._update_passes = 4.0 if recomputes else 3.0
        self.spent = before or Spent()

    def sampling(self, requests: Sequence[SampleRequest], responses: Sequence[Sample]) -> None:
        """One batch of sampling."""
        # a prompt that several requests share is read once
        lengths = {r.prompt_token_ids.tobytes(): len(r.prompt_token_ids) for r in requests}.values()
        tokens, flops = sum(lengths), sum(map(self._forward, lengths))
        for request, response in zip(requests, responses, strict=True):
            read, written = len(request.prompt_token_ids), len(response.token_ids)
            tokens += written
            flops += self._forward(read + written) - self._forward(read)
        self._add(tokens=tokens, flops=flops)

    def training(self, forward: Iterable[int], updates: Iterable[int]) -> None:
        """Sequences that the trainer computed, by their lengths in tokens.

        Args:
            forward: forward passes alone, for log-probs.
            updates: with the backward pass, which costs twice the forward pass.
        """
        forward, updates = list(forward), list(updates)
        flops = sum(map(self._forward, forward)) + self._update_passes * sum(map(self._forward, updates))
        self._add(tokens=sum(forward) + sum(updates), flops=flops)

    def time(self, seconds: Mapping[str, float]) -> None:
        """Seconds by stage of the loop."""
        counted = sum(value for stage, value in seconds.items() if stage not in FREE_STAGES)
        self._add(accelerator_seconds=counted * self._accelerators)

    def _forward(self, length: int) -> float:
        return forward_flops(self._shape, length)

    def _add(self, *, accelerator_seconds: float = 0.0, tokens: float = 0.0, flops: float = 0.0) -> None:
        before = self.spent
        self.spent = Spent(
            before.accelerator_seconds + accelerator_seconds, before.tokens + tokens, before.flops + flops
        )


def forward_flops(shape: ModelShape, length: int) -> float:
    """Floating-point operations of one causal forward pass over a sequence: 2 for each weight that a token
    meets in a matrix product, and what attention and the delta rule do with the sequence. Norms, embeddings,
    short convolutions and activations are left out."""
    heads = shape.num_attention_heads * shape.head_dim
    keys = shape.gdn_key_heads * shape.gdn_key_dim
    values = shape.gdn_value_heads * shape.gdn_value_dim
    hidden = shape.hidden_size
    queries = 2 * heads if shape.is_hybrid else heads  # hybrids have an output gate beside each query
    attention = hidden * (queries + 2 * shape.num_key_value_heads * shape.head_dim + heads)
    delta_net = hidden * (2 * keys + 3 * values + 2 * shape.gdn_value_heads)
    if shape.is_moe:
        experts = shape.experts_per_token * shape.expert_hidden_size + shape.shared_expert_hidden_size
        shared_gate = hidden if shape.shared_expert_hidden_size else 0
        mlp = 3 * hidden * experts + hidden * shape.num_experts + shared_gate
    else:
        mlp = 3 * hidden * shape.ffn_hidden_size
    attention_layers = sum(shape.full_attention)
    delta_layers = shape.num_layers - attention_layers
    weights = attention_layers * attention + delta_layers * delta_net + shape.num_layers * mlp
    per_token = 2.0 * (weights + hidden * shape.vocab_size)
    # each token against itself and all before it, once for the scores and once for the values
    scores = attention_layers * 2.0 * heads * length * (length + 1)
    # the state is decayed and read for the old value, written, and read for the output
    states = delta_layers * 6.0 * values * shape.gdn_key_dim * length
    return per_token * length + scores + states
