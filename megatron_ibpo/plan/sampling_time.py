"""Seconds of sampling: a roofline of each step of an engine, and a batch that changes as responses end.

A step reads the weights once (of experts those that some sequence chose), the cache and recurrent state of
every running sequence, and computes a token of each. Prompts are computed before. How engines keep their
batch full, and what slots memory gives them, is vLLM's continuous batching with its block-wise cache (Kwon et
al., arXiv 2309.06180); speculation is Leviathan et al.'s (arXiv 2211.17192).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.cost import mixer_cost, mixer_flops, seen_pairs, weight_count
from megatron_ibpo.plan.efficiencies import Efficiencies
from megatron_ibpo.plan.hardware import Hardware

FloatOrArray = TypeVar("FloatOrArray", float, np.ndarray)
GIB = 1024**3
MOST_SEQUENCES = 1024
"""That vLLM runs at once by default on GPUs of 70 GiB and more (256 on A100)."""
_GROUPS = 256
"""Responses that are followed one by one; of more, as many stand for several each."""
_WORKSPACE = 1.5 * GIB
"""Of an engine beside weights and cache: context, graphs, buffers (`plan.memory` counts them for a run)."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine: a group of GPUs that write together."""

    shape: ModelShape
    hardware: Hardware
    reached: Efficiencies
    tensor: int = 1
    """GPUs of it."""
    weight_bytes: float = 2.0
    """Of an element of the layers' matrices; embeddings and head have two."""
    cache_bytes: float = 2.0
    """Of an element of keys and values."""
    state_bytes: float = 2.0
    """Of an element of a recurrent state."""
    memory_share: float = 0.9
    """Of the GPUs' memory that the engine may use."""
    cache_share: float = 1.0
    """Of what the weights leave of that, for keys, values and states."""
    most_running: int = MOST_SEQUENCES
    serves: bool = True
    """Requests come one by one through a server; offline they are a list that is there from the start."""
    accepted: float = 0.0
    """Probability that the draft's next token is accepted; 0 without speculation."""
    drafted: int = 0
    """Tokens that are drafted in a step. What the draft costs is left out."""

    @property
    def precision(self) -> str:
        return "bf16" if self.weight_bytes == 2 else "fp8"

    def cache_of(self, tokens: FloatOrArray) -> FloatOrArray:
        """Bytes of a sequence's keys and values, on all GPUs together. Layers with a window keep no more."""
        shape = self.shape
        heads = max(shape.num_key_value_heads, min(self.tensor, shape.num_attention_heads))
        each = 2 * heads * shape.head_dim * self.cache_bytes
        kept: Any = sum(
            layers * (tokens if window is None else np.minimum(tokens, window))
            for window, layers in self._windows.items()
        )
        return each * kept

    @cached_property
    def _windows(self) -> Mapping[int | None, int]:
        return self.shape.attention_windows()

    @cached_property
    def state_per_sequence(self) -> float:
        """The same, of delta nets."""
        shape = self.shape
        mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
        recurrent = sum(mixer.recurrent_state for mixer in mixers)
        return self.state_bytes * recurrent + 2 * sum(mixer.convolution_state for mixer in mixers)

    def slots(self, tokens: float) -> int:
        """Sequences of so many tokens that run at once.

        Raises:
            ValueError: memory does not hold one of them beside the weights.
        """
        count = weight_count(self.shape)
        weights = (count.layers + count.experts) * self.weight_bytes + 2 * (
            count.total - count.layers - count.experts
        )
        free = self.tensor * (self.hardware.memory_gib * GIB * self.memory_share - _WORKSPACE) - weights
        fitting = self.cache_share * free / (self.cache_of(tokens) + self.state_per_sequence)
        if fitting < 1:
            raise ValueError(
                f"{self.tensor} GPUs of {self.hardware.name} do not hold the weights "
                f"({weights / GIB:.0f} GiB) and a sequence of {tokens:.0f} tokens"
            )
        return min(self.most_running, int(fitting))

    def step_seconds(self, running: FloatOrArray, context: FloatOrArray) -> FloatOrArray:
        """One step that writes a token of each of `running` sequences of `context` tokens on average."""
        shape, reached, count = self.shape, self.reached, weight_count(self.shape)
        bandwidth = self.tensor * self.hardware.memory_bandwidth * reached.decode
        tokens = running * (1 + self.drafted)
        read: Any = count.layers * self.weight_bytes + 2 * count.table
        if shape.is_moe:
            touched = 1 - (1 - shape.experts_per_token / shape.num_experts) ** tokens
            read += count.experts * touched * self.weight_bytes
        products = 2 * tokens * (count.layers + count.chosen + count.table) / self._rate
        caches = running * (self.cache_of(context) + 2 * self.state_per_sequence)
        on_gpus: Any = (
            np.maximum(read / bandwidth, products)
            + caches / bandwidth
            + shape.num_layers * reached.engine_layer
            + self._between(tokens)
        )
        on_host = running * reached.engine_sequence
        return np.maximum(on_gpus, on_host) if self.hardware.starts_ahead else on_gpus + on_host

    def prompt_seconds(self, tokens: float) -> float:
        """Reading one prompt beside others."""
        if tokens <= 0:
            return 0.0
        count, (per_token, per_pair) = weight_count(self.shape), mixer_flops(self.shape)
        work = tokens * (2 * (count.layers + count.chosen) + per_token)
        work += sum(flops * seen_pairs(tokens, window) for window, flops in per_pair.items())
        sent = 0.0
        if self.tensor > 1:
            each = 2 * 2 * self.shape.hidden_size * (self.tensor - 1) / self.tensor
            rate = self.hardware.between(self.tensor) * self.reached.link
            sent = 2 * self.shape.num_layers * each * tokens / rate
        return work / self._rate + sent

    @property
    def _rate(self) -> float:
        """Operations per second in products."""
        peak = self.tensor * self.hardware.peak(self.precision)
        return peak * self.reached.prefill * self.reached.on(self.hardware.generation)

    def per_step(self) -> float:
        """Tokens of a response that a step writes on average."""
        return 1 + sum(self.accepted**place for place in range(1, self.drafted + 1))

    def _between(self, tokens: Any) -> Any:
        """Sums over the GPUs, two in every layer."""
        if self.tensor == 1:
            return 0.0
        each = 2 * 2 * self.shape.hidden_size * (self.tensor - 1) / self.tensor * tokens
        sent = 2 * self.shape.num_layers * each / (self.hardware.between(self.tensor) * self.reached.link)
        nodes = 1 if self.tensor <= self.hardware.linked else 2
        return sent + 2 * nodes * self.shape.num_layers * self.reached.engine_tensor


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What an engine took for its responses."""

    seconds: float
    prompts: float
    """Of these, taking requests and reading their prompts."""
    tail: float
    """Of these, with fewer sequences running than half of what could."""
    tokens: float
    """Written."""
    mean_running: float
    slots: int


def sample(
    engine: Engine,
    responses: Sequence[float] | np.ndarray,
    *,
    prompt: float = 0.0,
    group: int = 1,
    concurrency: int | None = None,
) -> Sampled:
    """One engine writes these responses, in their order, as many at once as memory and `concurrency` let it.

    Args:
        prompt: tokens of every prompt.
        group: responses to each prompt, which reads it once and keeps it once (prefix caching); on hybrid
            models prompts are not shared.
        concurrency: requests that are under way at once; all when None.

    Raises:
        ValueError: memory does not hold a sequence.
    """
    lengths = np.asarray(responses, np.float64)
    if len(lengths) == 0:
        return Sampled(seconds=0.0, prompts=0.0, tail=0.0, tokens=0.0, mean_running=0.0, slots=0)
    shared = 1 if engine.shape.is_recurrent else group
    weight = max(1.0, len(lengths) / _GROUPS)
    if weight > 1:
        lengths = _thinned(lengths, _GROUPS)
    typical = float(lengths.mean()) / 2 + float((lengths**2).mean() / lengths.mean()) / 2
    slots = engine.slots(prompt / shared + typical)
    slots = min(slots, concurrency or slots)
    room = max(1, round(slots / weight))
    request = engine.reached.engine_request if engine.serves else 0.0
    reading = weight * (engine.prompt_seconds(prompt) / shared + request)
    plan = _schedule((lengths / engine.per_step()).tobytes(), room)
    each = engine.step_seconds(plan.running * weight, prompt + engine.per_step() * plan.written)
    spent = plan.steps * each
    prompts = reading * len(lengths)
    seconds = float(spent.sum()) + prompts
    return Sampled(
        seconds=seconds,
        prompts=prompts,
        tail=float(spent[plan.running < room / 2].sum()),
        tokens=float(lengths.sum() * weight),
        mean_running=float((spent * plan.running).sum() * weight) / seconds,
        slots=slots,
    )


@dataclass(frozen=True)
class _Schedule:
    """Stretches in which the same sequences run, in order."""

    steps: np.ndarray
    running: np.ndarray
    written: np.ndarray
    """Steps that a running sequence has taken on average, in the middle of the stretch."""


@lru_cache(maxsize=4096)
def _schedule(lengths: bytes, room: int) -> _Schedule:
    """Until the next response ends all running ones go on together; then the next one begins. This does not
    depend on how long a step takes.

    Args:
        lengths: steps of each response, float64.
    """
    waiting = iter(np.frombuffer(lengths).tolist())
    ends: list[tuple[float, float]] = []  # (step with which it ends, step with which it began)
    step = begun = 0.0
    stretches = []

    def begin() -> bool:
        nonlocal begun
        length = next(waiting, None)
        if length is None:
            return False
        begun += step
        heapq.heappush(ends, (step + length, step))
        return True

    while len(ends) < room and begin():
        pass
    while ends:
        count, end = len(ends), ends[0][0]
        stretches.append((end - step, count, (step + end) / 2 - begun / count))
        step, started = heapq.heappop(ends)
        begun -= started
        begin()
    steps, running, written = np.array(stretches).T
    return _Schedule(steps, running, written)


def _thinned(lengths: np.ndarray, count: int) -> np.ndarray:
    """As many of them, in their order, that have the same quantiles."""
    if lengths.min() == lengths.max():
        return lengths[:count]
    quantiles = np.quantile(lengths, (np.arange(count) + 0.5) / count)
    quantiles *= lengths.mean() / quantiles.mean()
    order = np.argsort(
        np.argsort(lengths[np.linspace(0, len(lengths) - 1, count).astype(int)], kind="stable")
    )
    return np.asarray(quantiles[order])
