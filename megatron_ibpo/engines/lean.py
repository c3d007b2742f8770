"""The lean back end: sampling in the process of the trainer, on the CPU, by plain torch in float32, for tiny
dense Qwen3, in waves (`engines.waves`). A vLLM engine takes ten seconds to start and is built for models a
thousand times as large."""

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
from megatron_ibpo.engines.protocol import EngineError, too_old
from megatron_ibpo.engines.waves import WaveSampler, left_padded
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
        self, shape: ModelShape, eos_token_ids: Sequence[int], *, max_context: int, most_at_once: int = 256
    ) -> None:
        """Raise ValueError for a model that the lean back end does not compute. `max_context` is the limit of
        tokens of prompt and response together, `most_at_once` of sequences in a wave."""
        check_shape(shape)
        self._shape = shape
        self._waves = WaveSampler(eos_token_ids, max_context, most_at_once)
        self._model: LeanModel | None = None
        self._version = -1
        self._waiting: dict[int, SampleRequest] = {}

    def load(self, weights: Iterable[tuple[str, Tensor | None]], version: int) -> int:
        """Copy the weights of policy `version`, under their Hugging Face names; returns their bytes. Raises
        EngineError if the policy is too large for this back end."""
        tensors = {
            name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in weights if tensor is not None
        }
        count = sum(tensor.numel() for tensor in tensors.values())
        if count > MOST_PARAMETERS:
            raise EngineError(
                f"--rollout-backend lean: takes policies of at most {MOST_PARAMETERS / 1e6:g} M "
                f"parameters, and this one has {count / 1e6:.1f} M; take vllm, or transformers"
            )
        self._model, self._version = LeanModel(self._shape, tensors), version
        return sum(tensor.nbytes for tensor in tensors.values())

    def generate(
        self, requests: Sequence[SampleRequest], *, version: int = 0, timeout: float = 0
    ) -> list[Sample]:
        """Return one sample for each request, in order. Computation here always ends, within `timeout` or
        not. Raises EngineError if the weights are older than `version`."""
        self._check(version)
        assert self._model is not None
        return self._waves.samples(self._model, requests, self._version)

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
        num_waiting = -1  # waits at least once, so that others can submit
        while len(self._waiting) > num_waiting:
            num_waiting = len(self._waiting)
            await asyncio.sleep(LINGER_S)
        numbers, requests = list(self._waiting), list(self._waiting.values())
        self._waiting.clear()
        return list(zip(numbers, self.generate(requests, version=self._version), strict=True))

    async def abort(self, numbers: Collection[int]) -> None:
        """Drop requests as `AsyncEngine` says."""
        for number in numbers:
            self._waiting.pop(number, None)

    async def kill(self, reason: str) -> None:
        """End the engine as `AsyncEngine` says. It is the caller's own process, and ends with it."""

    def _check(self, version: int) -> None:
        if self._version < version:
            raise EngineError(too_old(self._version, version))


# -------------------------------------------------------------------------------------------------- the model


@dataclass
class _Cache:
    """Keys and values of a wave. Prompts end in the same column, so that all rows write the same one next."""

    keys: list[Tensor]
    """Keys of each layer [rows, key-value heads, columns, head]."""
    values: list[Tensor]
    pads: Tensor
    """[rows] long: columns before the prompt, which attention does not see."""
    num_columns: int
    """Number of columns already written."""

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.pads = self.pads[rows]


class LeanModel:
    """A dense Qwen3 in float32, with the formulas of transformers' modeling_qwen3, and its weights by their
    Hugging Face names."""

    def __init__(self, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._shape = shape
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = self._embedding if shape.tie_word_embeddings else tensors["lm_head.weight"]
        self._norm = tensors["model.norm.weight"]
        self._layers = [
            _Layer.from_tensors(shape, tensors, f"model.layers.{number}.")
            for number in range(shape.num_layers)
        ]
        self._cos, self._sin = _rotations(shape)

    def read(self, prompts: Sequence[np.ndarray], room: int) -> tuple[Tensor, _Cache]:
        """Return (logits after each prompt [prompts, vocabulary], the cache with `room` columns more). A
        prompt that occurs several times is computed once."""
        ids, pads, rows = left_padded(prompts)
        count, longest = ids.shape
        size = (count, self._shape.num_key_value_heads, longest + room, self._shape.head_dim)
        cache = _Cache(
            [torch.zeros(size) for _ in self._layers], [torch.zeros(size) for _ in self._layers], pads, 0
        )
        logits = self._forward(ids, cache)
        cache.keep(rows)
        return logits[rows], cache

    def write(self, tokens: Tensor, cache: _Cache) -> Tensor:
        """Return the logits after one more token of each row."""
        return self._forward(tokens[:, None], cache)

    def _forward(self, ids: Tensor, cache: _Cache) -> Tensor:
        """Return the logits after the last of the tokens [rows, columns], which come after those in the
        cache."""
        first, last = cache.num_columns, cache.num_columns + ids.shape[1]
        columns = torch.arange(last)
        query_columns = columns[first:, None]  # [columns of ids, 1]
        pads = cache.pads[:, None, None]
        # padding sees itself, since a softmax over nothing is NaN
        hidden_from = ((columns > query_columns) | (columns < pads)) & (columns != query_columns)
        bias = torch.zeros(hidden_from.shape).masked_fill_(hidden_from, -torch.inf)
        positions = (columns[first:] - cache.pads[:, None]).clamp(min=0)
        rotation = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        hidden = F.embedding(ids, self._embedding)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            hidden = layer(hidden, rotation, keys, values, bias, first, last)
        cache.num_columns = last
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
    def from_tensors(cls, shape: ModelShape, tensors: Mapping[str, Tensor], name: str) -> "_Layer":
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
        attended = _attended(rotated[:, :, :heads], keys[:, :, :last], values[:, :, :last], bias)
        hidden = hidden + F.linear(attended, self.output)
        gate, up = F.linear(_normed(hidden, self.before_mlp, eps), self.gate_and_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.down)


def _attended(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Return attention's output, [rows, columns, query heads * head]. For one query per row
    `scaled_dot_product_attention` takes three times as long: here the query heads that share keys are the
    rows of one product.

    Args:
        queries: [rows, columns, query heads, head]
        keys: [rows, key-value heads, all columns, head]
        values: as `keys`.
        bias: [rows, columns, all columns]: 0 where a query attends, -inf elsewhere.
    """
    rows, columns, heads, head = queries.shape
    shared, num_keys = keys.shape[1:3]
    scaled_queries = (queries * head**-0.5).view(rows, columns, shared, heads // shared, head)
    scaled_queries = scaled_queries.permute(0, 2, 3, 1, 4).reshape(rows, shared, -1, head)
    scores = (scaled_queries @ keys.transpose(2, 3)).view(rows, shared, heads // shared, columns, num_keys)
    weights = scores.add_(bias[:, None, None]).softmax(-1).view(rows, shared, -1, num_keys)
    attended = (weights @ values).view(rows, shared, heads // shared, columns, head)
    return attended.permute(0, 3, 1, 2, 4).reshape(rows, columns, heads * head)


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    # half the operations of torch's own on a processor
    norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    return hidden * norms.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_() * weight


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _rotations(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) [positions, head]."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
    angles = torch.arange(shape.max_position_embeddings).double()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def checkpoint_weights(shape: ModelShape, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint, for `LeanEngine.load`. Raises CheckpointError if a file or a tensor
    is missing."""
    checkpoint, entries = Checkpoint(hf_dir), weight_map(shape).values()
    checkpoint.check(shape, entries)
    return ((piece.name, checkpoint.read(piece)) for entry in entries for piece in entry.pieces)


def check_shape(shape: ModelShape) -> None:
    """Raise ValueError for a model that the lean back end does not compute, with what it does not support."""
    if shape.rope_scaling is not None:
        raise ValueError(
            "--rollout-backend lean: does not support scaled rotary positions "
            f"({shape.rope_scaling.rope_type} in config.json); take vllm, or transformers"
        )
    names = {piece.name for entry in weight_map(shape).values() for piece in entry.pieces}
    if names != _names(shape) or shape.rotary_dim != shape.head_dim:
        raise ValueError(
            "--rollout-backend lean: supports only dense models built like qwen3, not "
            f"{shape.family}{' with experts' if shape.is_moe else ''}; take vllm, or transformers"
        )


def _names(shape: ModelShape) -> set[str]:
    """Return the names of the tensors that `_Layer` and the model around it read."""
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    mlp = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    layers = {f"model.layers.{n}.{part}.weight" for n in range(shape.num_layers) for part in layer}
    ends = {"model.embed_tokens.weight", "model.norm.weight"}
    return layers | ends | (set() if shape.tie_word_embeddings else {"lm_head.weight"})
