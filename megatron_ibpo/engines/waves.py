"""Sampling in waves: requests are decoded together, by any model, until the last of them has ended. Every
request draws from a random stream of its own, so that its samples do not depend on the other requests of the
wave. Temperature, top-k and top-p are those of vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.basics.sampling_mask import SamplingMask


class Decoder(Protocol):
    """A model that continues several rows at once."""

    def read(self, prompts: Sequence[np.ndarray], room: int) -> tuple[Tensor, Any]:
        """Return (float32 logits after each prompt [prompts, vocabulary], a cache with room for `room` more
        tokens of each, whose `keep(rows)` drops all other rows)."""

    def write(self, tokens: Tensor, cache: Any) -> Tensor:
        """Return the logits after one more token of each row."""


def left_padded(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ids [different prompts, longest] long, padded on the left with 0; the pads of each
    [different prompts]; the row of each prompt [prompts]). A prompt that occurs several times has one row."""
    different = {prompt.tobytes(): prompt for prompt in prompts}
    places = {content: place for place, content in enumerate(different)}
    longest = max(map(len, prompts))
    ids = torch.zeros(len(different), longest, dtype=torch.long)
    for row, prompt in enumerate(different.values()):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
    pads = torch.tensor([longest - len(prompt) for prompt in different.values()])
    return ids, pads, torch.tensor([places[prompt.tobytes()] for prompt in prompts])


@dataclass(frozen=True)
class WaveSampler:
    """Settings that all waves of an engine share."""

    eos_token_ids: Sequence[int]
    """A response ends with one of these."""
    max_context: int
    """Largest number of tokens of prompt and response together."""
    most_at_once: int
    """Largest number of sequences in a wave."""

    def samples(
        self,
        model: Decoder,
        requests: Sequence[SampleRequest],
        version: int,
        is_aborted: Callable[[int], bool] | None = None,
    ) -> list[Sample]:
        """Return one sample for each request, in order. Prompts of similar lengths share a wave.

        Args:
            version: policy version of the model's weights.
            is_aborted: returns, for the index of a request and between two tokens, whether to stop it; its
                sample then lacks an end.
        """
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_token_ids))
        samples: dict[int, Sample] = {}
        for first in range(0, len(order), self.most_at_once):
            places = order[first : first + self.most_at_once]
            wave = [requests[place] for place in places]
            stop = None if is_aborted is None else [partial(is_aborted, place) for place in places]
            samples.update(zip(places, self._wave(model, wave, version, stop), strict=True))
        return [samples[index] for index in range(len(requests))]

    @torch.inference_mode()
    def _wave(
        self,
        model: Decoder,
        requests: Sequence[SampleRequest],
        version: int,
        stop: Sequence[Callable[[], bool]] | None,
    ) -> list[Sample]:
        eos = torch.tensor(sorted(self.eos_token_ids), dtype=torch.long)
        limits = [min(r.max_tokens, self.max_context - len(r.prompt_token_ids)) for r in requests]
        wave = _Wave.from_requests(requests, limits)
        logits, cache = model.read([r.prompt_token_ids for r in requests], max(limits))
        tokens = torch.zeros(len(requests), max(limits), dtype=torch.long)
        logprobs = torch.zeros(len(requests), max(limits))
        lengths, stopped = torch.zeros(len(requests), dtype=torch.long), torch.zeros(len(requests)).bool()
        kept_ids = _KeptIds(requests, max(limits))
        for place in range(max(limits)):
            logits = _cut(logits / wave.temperature, wave)
            chosen, chosen_logprobs = _drawn(logits, wave.chances[:, place], wave.greedy)
            tokens[wave.rows, place], logprobs[wave.rows, place] = chosen, chosen_logprobs
            kept_ids.add(place, wave.rows, logits)
            ends = torch.isin(chosen, eos)
            over = ends | (place + 1 >= wave.limits)
            if stop is not None:
                over |= torch.tensor([stop[row]() for row in wave.rows.tolist()])
            lengths[wave.rows[over]], stopped[wave.rows[over]] = place + 1, ends[over]
            if bool(over.all()):
                break
            if bool(over.any()):
                unfinished = (~over).nonzero()[:, 0]
                wave, chosen = wave.only(unfinished), chosen[unfinished]
                cache.keep(unfinished)
            logits = model.write(chosen, cache)
        return [
            Sample(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=ids[:length].astype(np.int32),
                logprobs=values[:length].copy(),
                finish_reason="stop" if stop else "length",
                temperature=request.temperature,
                versions=((0, version),),
                loss_mask=np.ones(length, dtype=np.bool_),
                sampling_mask=mask,
            )
            for request, ids, values, length, stop, mask in zip(
                requests,
                tokens.numpy(),
                logprobs.numpy(),
                lengths.tolist(),
                stopped.tolist(),
                kept_ids.masks(lengths.tolist()),
                strict=True,
            )
        ]


@dataclass(frozen=True)
class _Wave:
    """The rows that are still being generated, with their settings as tensors."""

    rows: Tensor
    """[rows] long: index of each row's request."""
    limits: Tensor
    """[rows] long: most tokens of each row."""
    chances: Tensor
    """[rows, tokens] float64, uniform in [0, 1): the random number of each token."""
    temperature: Tensor
    """[rows, 1] float; 1 for greedy rows, as in vLLM's log-probs."""
    greedy: Tensor | None
    """[rows] bool; None: no row is greedy."""
    top_k: Tensor | None
    """[rows, 1] long; the vocabulary's size where off; None: off for all rows."""
    top_p: Tensor | None
    """[rows, 1] float; None: off for all rows."""

    @classmethod
    def from_requests(cls, requests: Sequence[SampleRequest], limits: Sequence[int]) -> "_Wave":
        greedy = [r.temperature == 0 for r in requests]
        top_k = [r.top_k if r.is_cut else -1 for r in requests]
        top_p = [r.top_p if r.is_cut else 1.0 for r in requests]
        return cls(
            torch.arange(len(requests)),
            torch.tensor(limits),
            _chances(requests, limits),
            torch.tensor([1.0 if r.temperature == 0 else r.temperature for r in requests])[:, None],
            torch.tensor(greedy) if any(greedy) else None,
            torch.tensor(top_k)[:, None] if max(top_k) > 0 else None,
            torch.tensor(top_p)[:, None] if min(top_p) < 1 else None,
        )

    def only(self, rows: Tensor) -> "_Wave":
        """Return the wave without all other rows."""
        parts: dict[str, Any] = {
            name: None if part is None else part[rows] for name, part in vars(self).items()
        }
        return _Wave(**parts)


def _chances(requests: Sequence[SampleRequest], limits: Sequence[int]) -> Tensor:
    """Return [requests, longest], from a stream per request that depends on its seed alone."""
    chances = np.zeros((len(requests), max(limits)))
    for row, (request, limit) in enumerate(zip(requests, limits, strict=True)):
        chances[row, :limit] = np.random.default_rng(request.seed).random(limit)
    return torch.from_numpy(chances)


def _drawn(logits: Tensor, chances: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (a token for each row, its log-prob).

    Args:
        logits: [rows, vocabulary] float32, after temperature, top-k and top-p.
        chances: [rows] in [0, 1): the token's place in the cumulative distribution.
        greedy: as in `_Wave`.
    """
    logprobs = logits.log_softmax(-1)
    below = logprobs.double().exp().cumsum(-1)
    chosen = (below <= chances[:, None] * below[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)
    if greedy is not None:
        chosen = torch.where(greedy, logits.argmax(-1), chosen)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


class _KeptIds:
    """The token ids that top-k and top-p left of each distribution in a wave, for `Sample.sampling_mask`."""

    def __init__(self, requests: Sequence[SampleRequest], most_tokens: int) -> None:
        self._is_cut = torch.tensor([request.is_cut for request in requests])
        self._counts = torch.zeros(len(requests), most_tokens, dtype=torch.long)
        self._rows: list[Tensor] = []
        """Row of each of the ids below, by token."""
        self._ids: list[Tensor] = []

    def add(self, place: int, rows: Tensor, logits: Tensor) -> None:
        """Note what is left at this token of these rows: where the logit is finite. A row of which nothing
        was cut has no ids."""
        if not self._is_cut.any():  # a third of the time of drawing
            return
        remaining = (logits > -torch.inf) & self._is_cut[rows][:, None]
        remaining &= ~remaining.all(-1, keepdim=True)
        self._counts[rows, place] = remaining.sum(-1)
        places, ids = remaining.nonzero(as_tuple=True)
        self._rows.append(rows[places])
        self._ids.append(ids)

    def masks(self, lengths: Sequence[int]) -> list[SamplingMask | None]:
        """Return the mask of each request's response; None if its distribution was not cut."""
        if not self._ids:
            return [None] * len(lengths)
        order = torch.cat(self._rows).argsort(stable=True)
        ids = torch.cat(self._ids)[order].int().split(self._counts.sum(1).tolist())
        return [
            SamplingMask(row_ids.numpy().copy(), np.append(0, counts[:length].cumsum())) if is_cut else None
            for row_ids, counts, length, is_cut in zip(
                ids, self._counts.numpy(), lengths, self._is_cut.tolist(), strict=True
            )
        ]


def _cut(logits: Tensor, wave: _Wave) -> Tensor:
    """Keep only the likeliest tokens: the top k, and of those the fewest that together reach the probability
    p. As vLLM's `apply_top_k_top_p_pytorch`."""
    if wave.top_k is None and wave.top_p is None:
        return logits
    ordered, places = logits.sort(dim=-1)
    if wave.top_k is not None:
        size = logits.shape[1]
        top_k = torch.where(wave.top_k > 0, wave.top_k, size).clamp(max=size)
        ordered = ordered.masked_fill(ordered < ordered.gather(1, size - top_k), -torch.inf)
    if wave.top_p is not None:
        outside = (ordered.softmax(-1).cumsum(-1) <= 1 - wave.top_p) & (wave.top_p < 1)
        outside[:, -1] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, places, ordered)
