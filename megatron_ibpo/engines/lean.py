"""The lean back end: sampling in the process of the trainer, on the CPU, by plain torch in float32, for tiny
dense Qwen3.

A vLLM engine takes ten seconds to start and is built for models a thousand times as large. Here a wave of
requests is decoded together until the last one has ended. Every request draws from a random stream of its
own, so that its samples do not depend on the other requests of the wave.
"""

import asyncio
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.basics.sampling_mask import SamplingMask
from megatron_ibpo.engines.protocol import EngineError
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.weights.formats.hugging_face import Checkpoint

MOST_PARAMETERS = 4_000_000
"""Parameters of the largest policy that is sampled here; vLLM samples larger ones faster even on CPUs."""
LINGER_S = 0.01
"""Seconds without a new request after which a wave begins. Requests that arrive one by one, as their groups
are scored, so share a wave."""


class LeanEngine:
    """A policy that samples in this process, called from an event loop (`engines.AsyncEngine`)."""

    def __init__(
        self, shape: ModelShape, eos_token_ids: Sequence[int], *, max_context: int, most_at_once: int
    ) -> None:
        """
        Args:
            max_context: tokens of prompt and response together.
            most_at_once: largest number of sequences in a wave.

        Raises:
            ValueError: a model that the lean back end does not compute.
        """
        check_shape(shape)
        self._shape, self._eos = shape, torch.tensor(sorted(eos_token_ids), dtype=torch.long)
        self._max_context, self._most = max_context, most_at_once
        self._model: LeanModel | None = None
        self._version = -1
        self._waiting: dict[int, SampleRequest] = {}

    def load(self, weights: Iterable[tuple[str, Tensor | None]], version: int) -> int:
        """Copy the weights of policy `version`, under their Hugging Face names; returns their bytes.

        Raises:
            EngineError: the policy is too large for this back end.
        """
        own = {
            name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in weights if tensor is not None
        }
        count = sum(tensor.numel() for tensor in own.values())
        if count > MOST_PARAMETERS:
            raise EngineError(
                f"--rollout-backend lean: takes policies of at most {MOST_PARAMETERS / 1e6:g} M "
                f"parameters, and this one has {count / 1e6:.1f} M; take vllm"
            )
        self._model, self._version = LeanModel(self._shape, own), version
        return sum(tensor.nbytes for tensor in own.values())

    def generate(
        self, requests: Sequence[SampleRequest], *, version: int = 0, timeout: float = 0
    ) -> list[Sample]:
        """Return one sample for each request, in order.

        Args:
            timeout: as for other engines; computation here always ends.

        Raises:
            EngineError: the weights are older than `version`.
        """
        self._check(version)
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_token_ids))
        samples: dict[int, Sample] = {}
        for first in range(0, len(order), self._most):
            places = order[first : first + self._most]
            samples.update(zip(places, self._wave([requests[place] for place in places]), strict=True))
        return [samples[index] for index in range(len(requests))]

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call `digests`, the only supported method: digests of each tensor of the single worker."""
        if method != "digests":
            raise EngineError(f"the lean back end has no {method}")
        assert self._model is not None
        tensors = self._model.tensors.items()
        return [{name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors}]

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add requests as `AsyncEngine` says."""
        self._check(version)
        self._waiting.update(requests)

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Take samples as `AsyncEngine` says. Samples all waiting requests, however long that takes: nothing
        else can be done here meanwhile."""
        asked = -1  # waits at least once, so that others can submit
        while len(self._waiting) > asked:
            asked = len(self._waiting)
            await asyncio.sleep(LINGER_S)
        numbers, requests = list(self._waiting), list(self._waiting.values())
        self._waiting.clear()
        return list(zip(numbers, self.generate(requests, version=self._version), strict=True))

    async def abort(self, numbers: Collection[int]) -> None:
        """Drop requests as `AsyncEngine` says."""
        for number in numbers:
            self._waiting.pop(number, None)

    async def kill(self, why: str) -> None:
        """End the engine as `AsyncEngine` says. It is the caller's own process, and ends with it."""

    def _check(self, version: int) -> None:
        if self._version < version:
            raise EngineError(
                f"asked to sample with policy version {version}, the engine has {self._version}"
            )

    @torch.inference_mode()
    def _wave(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        assert self._model is not None
        room = self._max_context
        limits = [min(r.max_tokens, room - len(r.prompt_token_ids)) for r in requests]
        wave = _Wave(
            rows=torch.arange(len(requests)),
            limits=torch.tensor(limits),
            chances=_chances(requests, limits),
            settings=_Settings.of(requests),
        )
        logits, cache = self._model.read([r.prompt_token_ids for r in requests], max(limits))
        tokens = torch.zeros(len(requests), max(limits), dtype=torch.long)
        logprobs = torch.zeros(len(requests), max(limits))
        lengths, stopped = torch.zeros(len(requests), dtype=torch.long), torch.zeros(len(requests)).bool()
        kept_ids = _KeptIds(requests, max(limits))
        for place in range(max(limits)):
            logits = _cut(logits / wave.settings.temperature, wave.settings)
            chosen, chosen_logprobs = _drawn(logits, wave.chances[:, place], wave.settings)
            tokens[wave.rows, place], logprobs[wave.rows, place] = chosen, chosen_logprobs
            kept_ids.add(place, wave.rows, logits)
            ends = torch.isin(chosen, self._eos)
            over = ends | (place + 1 >= wave.limits)
            lengths[wave.rows[over]], stopped[wave.rows[over]] = place + 1, ends[over]
            if bool(over.all()):
                break
            if bool(over.any()):
                left = (~over).nonzero()[:, 0]
                wave, chosen = wave.only(left), chosen[left]
                cache.keep(left)
            logits = self._model.write(chosen, cache)
        return [
            Sample(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=ids[:length].astype(np.int32),
                logprobs=values[:length].copy(),
                finish_reason="stop" if stop else "length",
                temperature=request.temperature,
                versions=((0, self._version),),
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


# ------------------------------------------------------------------------------------- drawing of tokens


@dataclass(frozen=True)
class _Settings:
    """Sampling parameters of the rows of a wave."""

    temperature: Tensor
    """[rows, 1] float; 1 for greedy rows, as in vLLM's log-probs."""
    greedy: Tensor | None
    """[rows] bool; None: no row is greedy."""
    top_k: Tensor | None
    """[rows, 1] long; the vocabulary's size where off; None: off for all rows."""
    top_p: Tensor | None
    """[rows, 1] float; None: off for all rows."""

    @classmethod
    def of(cls, requests: Sequence[SampleRequest]) -> "_Settings":
        greedy = [r.temperature == 0 for r in requests]
        top_k = [r.top_k if r.is_cut else -1 for r in requests]
        top_p = [r.top_p if r.is_cut else 1.0 for r in requests]
        return cls(
            torch.tensor([1.0 if r.temperature == 0 else r.temperature for r in requests])[:, None],
            torch.tensor(greedy) if any(greedy) else None,
            torch.tensor(top_k)[:, None] if max(top_k) > 0 else None,
            torch.tensor(top_p)[:, None] if min(top_p) < 1 else None,
        )

    def only(self, rows: Tensor) -> "_Settings":
        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return _Settings(self.temperature[rows], part(self.greedy), part(self.top_k), part(self.top_p))


@dataclass(frozen=True)
class _Wave:
    """The rows that are still being generated."""

    rows: Tensor
    """[rows] long: index of each row's request."""
    limits: Tensor
    """[rows] long: most tokens of each row."""
    chances: Tensor
    """[rows, tokens] float64, uniform in [0, 1): the random number of each token."""
    settings: _Settings

    def only(self, rows: Tensor) -> "_Wave":
        return _Wave(self.rows[rows], self.limits[rows], self.chances[rows], self.settings.only(rows))


def _chances(requests: Sequence[SampleRequest], limits: Sequence[int]) -> Tensor:
    """Return [requests, longest], from a stream per request that depends on its seed alone."""
    chances = np.zeros((len(requests), max(limits)))
    for row, (request, limit) in enumerate(zip(requests, limits, strict=True)):
        chances[row, :limit] = np.random.default_rng(request.seed).random(limit)
    return torch.from_numpy(chances)


def _drawn(logits: Tensor, chances: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Return (a token for each row, its log-prob).

    Args:
        logits: [rows, vocabulary] float32, after temperature, top-k and top-p.
        chances: [rows] in [0, 1): the token's place in the cumulative distribution.
    """
    logprobs = logits.log_softmax(-1)
    below = logprobs.double().exp().cumsum(-1)
    chosen = (below <= chances[:, None] * below[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)
    if settings.greedy is not None:
        chosen = torch.where(settings.greedy, logits.argmax(-1), chosen)
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
        kept = (logits > -torch.inf) & self._is_cut[rows][:, None]
        kept &= ~kept.all(-1, keepdim=True)
        self._counts[rows, place] = kept.sum(-1)
        places, ids = kept.nonzero(as_tuple=True)
        self._rows.append(rows[places])
        self._ids.append(ids)

    def masks(self, lengths: Sequence[int]) -> list[SamplingMask | None]:
        """Return the mask of each request's response; None if its distribution was not cut."""
        if not self._ids:
            return [None] * len(lengths)
        order = torch.cat(self._rows).argsort(stable=True)
        ids = torch.cat(self._ids)[order].int().split(self._counts.sum(1).tolist())
        return [
            SamplingMask(own.numpy().copy(), np.append(0, counts[:length].cumsum())) if is_cut else None
            for own, counts, length, is_cut in zip(
                ids, self._counts.numpy(), lengths, self._is_cut.tolist(), strict=True
            )
        ]


def _cut(logits: Tensor, settings: _Settings) -> Tensor:
    """Keep only the likeliest tokens: the top k, and of those the fewest that together reach the probability
    p. As vLLM's `apply_top_k_top_p_pytorch`."""
    if settings.top_k is None and settings.top_p is None:
        return logits
    ordered, places = logits.sort(dim=-1)
    if settings.top_k is not None:
        size = logits.shape[1]
        top_k = torch.where(settings.top_k > 0, settings.top_k, size).clamp(max=size)
        ordered = ordered.masked_fill(ordered < ordered.gather(1, size - top_k), -torch.inf)
    if settings.top_p is not None:
        outside = (ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p) & (settings.top_p < 1)
        outside[:, -1] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, places, ordered)


# --------------------------------------------------------------------------------------------- the model


@dataclass
class _Cache:
    """Keys and values of a wave. Prompts end in the same column, so that all rows write the same one next."""

    keys: list[Tensor]
    """Keys of each layer [rows, key-value heads, columns, head]."""
    values: list[Tensor]
    pads: Tensor
    """[rows] long: columns before the prompt, which attention does not see."""
    filled: int
    """Number of columns already written."""

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.pads = self.pads[rows]


class LeanModel:
    """A dense Qwen3 in float32, with the formulas of transformers' modeling_qwen3."""

    def __init__(self, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
        """
        Args:
            tensors: weights by their Hugging Face names.
        """
        self.tensors = tensors
        self._shape = shape
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = self._embedding if shape.tie_word_embeddings else tensors["lm_head.weight"]
        self._norm = tensors["model.norm.weight"]
        self._layers = [
            _Layer.of(shape, tensors, f"model.layers.{number}.") for number in range(shape.num_layers)
        ]
        self._cos, self._sin = _rotations(shape)

    def read(self, prompts: Sequence[np.ndarray], room: int) -> tuple[Tensor, _Cache]:
        """Return (logits after each prompt [prompts, vocabulary], the cache with `room` columns more). A
        prompt that occurs several times is computed once."""
        different = {prompt.tobytes(): prompt for prompt in prompts}
        places = {content: place for place, content in enumerate(different)}
        longest = max(map(len, prompts))
        ids = torch.zeros(len(different), longest, dtype=torch.long)
        pads = torch.tensor([longest - len(prompt) for prompt in different.values()])
        for row, prompt in enumerate(different.values()):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        shape = self._shape
        size = (len(different), shape.num_key_value_heads, longest + room, shape.head_dim)
        cache = _Cache(
            [torch.zeros(size) for _ in self._layers], [torch.zeros(size) for _ in self._layers], pads, 0
        )
        logits = self._forward(ids, cache)
        rows = torch.tensor([places[prompt.tobytes()] for prompt in prompts])
        cache.keep(rows)
        return logits[rows], cache

    def write(self, tokens: Tensor, cache: _Cache) -> Tensor:
        """Return the logits after one more token of each row."""
        return self._forward(tokens[:, None], cache)

    def _forward(self, ids: Tensor, cache: _Cache) -> Tensor:
        """Return the logits after the last of the tokens [rows, columns], which come after those in the
        cache."""
        first, last = cache.filled, cache.filled + ids.shape[1]
        columns = torch.arange(last)
        own = columns[first:, None]  # [columns of ids, 1]
        pads = cache.pads[:, None, None]
        # padding sees itself, since a softmax over nothing is NaN
        hidden_from = ((columns > own) | (columns < pads)) & (columns != own)
        bias = torch.zeros(hidden_from.shape).masked_fill_(hidden_from, -torch.inf)
        positions = (columns[first:] - cache.pads[:, None]).clamp(min=0)
        rotation = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        hidden = F.embedding(ids, self._embedding)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            hidden = layer(hidden, rotation, keys, values, bias, first, last)
        cache.filled = last
        return F.linear(_normed(hidden[:, -1], self._norm, self._shape.rms_norm_eps), self._head)


@dataclass(frozen=True)
class _Layer:
    shape: ModelShape
    before_attention: Tensor
    projection: Tensor
    """Projection of queries, keys and values together."""
    head_norms: Tensor
    """[query and key heads, head]"""
    output: Tensor
    before_mlp: Tensor
    gate_and_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, shape: ModelShape, tensors: Mapping[str, Tensor], name: str) -> "_Layer":
        def part(suffix: str) -> Tensor:
            return tensors[f"{name}{suffix}.weight"]

        queries = part("self_attn.q_norm").expand(shape.num_attention_heads, -1)
        keys = part("self_attn.k_norm").expand(shape.num_key_value_heads, -1)
        return cls(
            shape,
            part("input_layernorm"),
            torch.cat([part(f"self_attn.{kind}_proj") for kind in "qkv"]),
            torch.cat([queries, keys]),
            part("self_attn.o_proj"),
            part("post_attention_layernorm"),
            torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")]),
            part("mlp.down_proj"),
        )

    def __call__(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        first: int,
        last: int,
    ) -> Tensor:
        """Map [rows, columns, hidden] to the same; write columns `first` to `last` of the cache."""
        shape, eps = self.shape, self.shape.rms_norm_eps
        rows, columns, _ = hidden.shape
        heads, shared = shape.num_attention_heads, shape.num_key_value_heads
        mixed = F.linear(_normed(hidden, self.before_attention, eps), self.projection)
        mixed = mixed.view(rows, columns, heads + 2 * shared, shape.head_dim)
        rotated = _rotated(_normed(mixed[:, :, : heads + shared], self.head_norms, eps), *rotation)
        keys[:, :, first:last] = rotated[:, :, heads:].transpose(1, 2)
        values[:, :, first:last] = mixed[:, :, heads + shared :].transpose(1, 2)
        seen = _attended(rotated[:, :, :heads], keys[:, :, :last], values[:, :, :last], bias)
        hidden = hidden + F.linear(seen, self.output)
        gate, up = F.linear(_normed(hidden, self.before_mlp, eps), self.gate_and_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.down)


def _attended(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Return attention's output, [rows, columns, query heads * head].

    `scaled_dot_product_attention` takes three times as long for one query per row: here the query heads that
    share keys are the rows of one product.

    Args:
        queries: [rows, columns, query heads, head]
        keys: [rows, key-value heads, all columns, head]
        values: as `keys`.
        bias: [rows, columns, all columns]: 0 where a query attends, -inf elsewhere.
    """
    rows, columns, heads, head = queries.shape
    shared, seen = keys.shape[1:3]
    own = (queries * head**-0.5).view(rows, columns, shared, heads // shared, head)
    own = own.permute(0, 2, 3, 1, 4).reshape(rows, shared, -1, head)
    scores = (own @ keys.transpose(2, 3)).view(rows, shared, heads // shared, columns, seen)
    weights = scores.add_(bias[:, None, None]).softmax(-1).view(rows, shared, -1, seen)
    found = (weights @ values).view(rows, shared, heads // shared, columns, head)
    return found.permute(0, 3, 1, 2, 4).reshape(rows, columns, heads * head)


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    # half the operations of torch's own on a processor
    norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    return hidden * norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_() * weight


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = heads.chunk(2, -1)
    return heads * cos + torch.cat([-right, left], -1) * sin


def _rotations(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) [positions, head]."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
    angles = torch.arange(shape.max_position_embeddings).double()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def checkpoint_weights(shape: ModelShape, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint, for `LeanEngine.load`.

    Raises:
        CheckpointError: a file or a tensor is missing.
    """
    checkpoint, entries = Checkpoint(hf_dir), weight_map(shape).values()
    checkpoint.check(shape, entries)
    return ((piece.name, checkpoint.read(piece)) for entry in entries for piece in entry.pieces)


def check_shape(shape: ModelShape) -> None:
    """
    Raises:
        ValueError: a model that the lean back end does not compute.
    """
    if shape.rope_scaling is not None:
        raise ValueError(
            "--rollout-backend lean: does not support scaled rotary positions "
            f"({shape.rope_scaling.rope_type} in config.json); take vllm"
        )
    names = {piece.name for entry in weight_map(shape).values() for piece in entry.pieces}
    if names != _names(shape) or shape.rotary_dim != shape.head_dim:
        raise ValueError(
            "--rollout-backend lean: supports only dense models built like qwen3, not "
            f"{shape.family}{' with experts' if shape.is_moe else ''}; take vllm"
        )


def _names(shape: ModelShape) -> set[str]:
    """Return the names of the tensors that `_Layer` and the model around it read."""
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    layers = {f"model.layers.{n}.{part}.weight" for n in range(shape.num_layers) for part in layer}
    ends = {"model.embed_tokens.weight", "model.norm.weight"}
    return layers | ends | (set() if shape.tie_word_embeddings else {"lm_head.weight"})
