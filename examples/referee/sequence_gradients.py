"""Gradients of single sequences of a frozen policy, by vmap: what each response would do to the weights."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from megatron_ibpo.basics.records import TokenIds, TrainSequence, Weights
from megatron_ibpo.loss.segments import shaped_surrogate
from megatron_ibpo.policy.logits_check import transformers_model

Parameters = dict[str, Tensor]
Logits = Callable[[Parameters, Tensor], Tensor]
"""(parameters, token ids [tokens]) → logits after each token [tokens, vocabulary]."""
SEQUENCES_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class GradientQuery:
    """A sum of log-probs of response tokens whose gradient is wanted."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    weights: Weights
    """Factor of each response token."""
    off_policy: bool = False
    """Sum the shaped surrogate of off-policy samples in place of log-probs."""

    @cached_property
    def key(self) -> str:
        """Digest of the content; equal queries have equal gradients."""
        parts = (self.prompt_ids.astype(np.int64), self.response_ids.astype(np.int64), self.weights)
        head = f"{len(self.prompt_ids)} {int(self.off_policy)}".encode()
        return hashlib.sha256(head + b"".join(part.tobytes() for part in parts)).hexdigest()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def query_of(sequence: TrainSequence) -> tuple[GradientQuery, float]:
    """Return (query, coefficient). The gradient times the coefficient is the ascent direction of a sequence
    under GSPO or GRPO before the first update, where the ratio is 1 and nothing is clipped. A constant token
    weight goes into the coefficient, so that it needs no gradient of its own."""
    trained = sequence.loss_mask
    weights, factor = trained / max(1, sequence.num_trained_tokens), 1.0
    if sequence.token_weights is not None and trained.any():
        if np.ptp(sequence.token_weights[trained]) == 0:
            factor = float(sequence.token_weights[trained][0])
        else:
            weights = weights * sequence.token_weights
    query = GradientQuery(
        sequence.prompt_token_ids, sequence.response_token_ids, weights, off_policy=sequence.off_policy
    )
    return query, sequence.weight * sequence.advantage * factor


def score_query(prompt_ids: TokenIds, response_ids: TokenIds) -> GradientQuery:
    """Return the query for the gradient of a response's log-prob."""
    return GradientQuery(prompt_ids, response_ids, np.ones(len(response_ids)))


class SequenceGradients:
    """Gradients of a policy's sequences, as flat vectors in the order of `parameters`."""

    def __init__(self, parameters: Mapping[str, Tensor], logits: Logits) -> None:
        self._parameters = {name: tensor.detach() for name, tensor in parameters.items()}
        self._logits = logits
        self.size = sum(tensor.numel() for tensor in parameters.values())
        """Number of parameters."""

    def each(self, queries: Sequence[GradientQuery]) -> Tensor:
        """Return [queries, size]: one gradient for each query."""
        rows = torch.zeros(len(queries), self.size)
        gradients = vmap(grad(self._value), in_dims=(None, 0, 0, 0, 0, 0))
        for places in _batches(queries):
            of_batch = gradients(self._parameters, *_padded([queries[place] for place in places]))
            rows[places] = torch.cat([of_batch[name].flatten(1) for name in self._parameters], 1)
        return rows

    def sum(self, queries: Sequence[GradientQuery], coefficients: Sequence[float]) -> Tensor:
        """Return [size]: the sum of the gradients, each times its coefficient. Cheaper than `each`."""
        total = torch.zeros(self.size)
        gradient = grad(self._weighted)
        for places in _batches(queries):
            factors = torch.tensor([coefficients[place] for place in places], dtype=torch.float32)
            of_batch = gradient(self._parameters, factors, _padded([queries[place] for place in places]))
            total += torch.cat([of_batch[name].flatten() for name in self._parameters])
        return total

    def _weighted(self, parameters: Parameters, factors: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        values = vmap(self._value, in_dims=(None, 0, 0, 0, 0, 0))(parameters, *inputs)
        return (values * factors).sum()

    def _value(
        self,
        parameters: Parameters,
        ids: Tensor,
        places: Tensor,
        targets: Tensor,
        weights: Tensor,
        off: Tensor,
    ) -> Tensor:
        logprobs = self._logits(parameters, ids)[places].log_softmax(-1)
        logprobs = logprobs.gather(1, targets[:, None])[:, 0]
        surrogate = -shaped_surrogate(logprobs, torch.ones_like(logprobs))
        return (torch.where(off, surrogate, logprobs) * weights).sum()


def transformers_gradients(hf_dir: Path) -> SequenceGradients:
    """Return the gradients of a dense checkpoint, computed by transformers in float32."""
    model = transformers_model(hf_dir, torch.float32).eval()

    def logits(parameters: Parameters, ids: Tensor) -> Tensor:
        length = len(ids)
        hidden = torch.full((length, length), -torch.inf).triu(1)
        places = torch.arange(length)[None]
        inputs = {
            "input_ids": ids[None],
            "position_ids": places,
            "attention_mask": {"full_attention": hidden[None, None]},
            "use_cache": False,
        }
        return functional_call(model, parameters, (), inputs).logits[0]

    return SequenceGradients(dict(model.named_parameters()), logits)


def _batches(queries: Sequence[GradientQuery]) -> list[list[int]]:
    """Return the places of queries of similar lengths together."""
    order = sorted(range(len(queries)), key=lambda place: queries[place].num_tokens)
    return [order[i : i + SEQUENCES_AT_ONCE] for i in range(0, len(order), SEQUENCES_AT_ONCE)]


def _padded(queries: Sequence[GradientQuery]) -> tuple[Tensor, ...]:
    """Return (ids, places of the response's predictions, targets, weights, off-policy flags), padded on the
    right, where causal attention does not look."""
    longest = max(query.num_tokens for query in queries)
    written = max(len(query.response_ids) for query in queries)
    ids = torch.zeros(len(queries), longest, dtype=torch.long)
    places = torch.zeros(len(queries), written, dtype=torch.long)
    targets, weights = torch.zeros_like(places), torch.zeros(len(queries), written)
    for row, query in enumerate(queries):
        read, count = len(query.prompt_ids), len(query.response_ids)
        ids[row, : read + count] = torch.from_numpy(
            np.concatenate([query.prompt_ids, query.response_ids]).astype(np.int64)
        )
        places[row, :count] = torch.arange(read - 1, read + count - 1)
        targets[row, :count] = torch.from_numpy(query.response_ids.astype(np.int64))
        weights[row, :count] = torch.from_numpy(query.weights.astype(np.float32))
    off = torch.tensor([query.off_policy for query in queries])
    return ids, places, targets, weights, off
