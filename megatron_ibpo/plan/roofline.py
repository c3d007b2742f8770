"""Seconds of a trainer's pass, of sampling and of a weight update: one roofline of about ten coefficients.

Work is divided by the share of a data sheet's rate that programs reach (`plan.workload`). A trainer's
pass adds up products, attention, memory traffic, exchanges between ranks, the pipeline's bubble and the
optimizer. An engine reads prompts and then takes decoding steps. Each step reads the weights or computes
products, whichever takes longer, and reads caches.

Volumes and bubble follow Narayanan et al. (arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198),
sharded optimizer state Rajbhandari et al. (arXiv 1910.02054).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.cost import (
    cached_elements,
    kept_elements,
    kv_elements_by_window,
    mixer_cost,
    mixer_flops,
    seen_pairs,
    weight_count,
)
from megatron_ibpo.models.layout import context_chunks
from megatron_ibpo.plan.workload import Basis, Batch, Engine, Layout, PassTime, Sampled

GIB = 1024**3
_BACKWARD = 2.0
"""Operations of a backward pass relative to the forward pass."""
_ATTENTION_BACKWARD = 2.5
"""The same in flash attention, which recomputes the scores (Dao, arXiv 2307.08691)."""
_REPEATED = {"none": 0.0, "selective": 0.35, "full": 1.0}
"""Share of the forward pass that recomputation repeats."""
_STATE_RULE = 2.0
"""Operations of a delta net whose ranks pass states on, relative to one rank."""
_GRADIENT_BYTES = 8
"""Bytes per parameter moved when a micro-batch's gradient is added in fp32."""
_REDUCED_BYTES = 6
"""Bytes per parameter between data-parallel ranks: gradients in fp32, weights in bf16."""
_ADAM_BYTES = 26
"""Bytes per parameter moved by an optimizer step: gradient, master weight, two means, weight."""
_OFFLOADED_BYTES = 6
"""Bytes per parameter between GPU and an optimizer in main memory: gradient out, weight back."""
_STATE_BYTES = 12
"""Bytes per parameter of master weight and two means."""
_WORKSPACE = 1.5 * GIB
"""Memory of an engine's GPU besides weights and cache."""

# ------------------------------------------------------------------------------------------- training


def pass_time(
    basis: Basis, layout: Layout, batch: Batch, *, backward: bool = True, steps: int = 1
) -> PassTime:
    """Return the seconds of a forward pass, or with `backward` of an update in `steps` optimizer steps."""
    work = _Pass(basis, layout, batch, backward, steps)
    products, attention, memory = work.products(), work.attention(), work.memory()
    computing = products + attention + memory
    tensor, expert, context = work.tensor(), work.expert(), work.context(attention)
    busy = computing + tensor + expert + context
    return PassTime(
        products=products,
        attention=attention,
        memory=memory,
        tensor=tensor,
        expert=expert,
        context=context,
        pipeline=work.pipeline(busy),
        data=work.data(computing) if backward else 0.0,
        optimizer=steps * optimizer_seconds(basis, layout) if backward else 0.0,
    )


@dataclass(frozen=True)
class _Pass:
    """One pass of a trainer; each method gives the seconds of one term on one GPU."""

    basis: Basis
    layout: Layout
    batch: Batch
    backward: bool
    steps: int

    @property
    def repeated(self) -> float:
        """Share of the forward pass that is recomputed for the backward pass."""
        return _REPEATED[self.layout.recompute] if self.backward else 0.0

    @property
    def passes(self) -> float:
        """Work of all passes relative to a forward pass."""
        return 1 + self.repeated + (_BACKWARD if self.backward else 0)

    @property
    def exchanges(self) -> int:
        """Number of passes with exchanges between ranks."""
        return 1 + (self.repeated == 1) + self.backward

    @property
    def tokens(self) -> float:
        """Tokens of one rank."""
        return self.batch.tokens / self.layout.copies

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a data-parallel rank. On average half a sequence does not fit into one."""
        size, mean = self.layout.micro_batch, self.batch.tokens / self.batch.sequences
        fill = size if mean >= size or size % mean < 1e-9 else size - mean / 2
        return max(float(self.steps), self.batch.tokens / self.layout.data / max(fill, mean))

    def products(self) -> float:
        count, reached = weight_count(self.basis.shape), self.basis.reached
        peak = self.basis.peak(self.layout.precision)
        seconds = count.layers / (peak * reached.matmul) + count.chosen / (peak * reached.experts)
        seconds += count.table / (self.basis.peak("bf16") * reached.matmul)
        return 2 * self.batch.tokens * self.passes / self.layout.gpus * seconds

    def attention(self) -> float:
        per_token, per_pair = mixer_flops(self.basis.shape)
        passes = 1 + (self.repeated == 1) + (_ATTENTION_BACKWARD if self.backward else 0)
        work = passes * sum(flops * self.batch.pairs(window) for window, flops in per_pair.items())
        rule = _STATE_RULE if self.layout.passes_states else 1.0
        work += rule * self.passes * per_token * self.batch.tokens
        return work / self.layout.gpus / (self.basis.peak("bf16") * self.basis.reached.attention)

    def memory(self) -> float:
        layout, basis = self.layout, self.basis
        activations = 2 * _activation_bytes(basis.shape, layout.tensor, layout.context, layout.delta_net_cp)
        moved = activations * self.tokens / layout.pipeline * self.passes
        bytes_each = 2 * (1 + self.repeated) + (2 + _GRADIENT_BYTES if self.backward else 0)
        moved += sum(layout.parameters(basis.shape)) * self.micro_batches * bytes_each
        return moved / (basis.hardware.memory_bandwidth * basis.reached.memory)

    def tensor(self) -> float:
        """Return the time of sequence parallelism, which gathers and scatters four times in the forward pass
        and six times in the backward pass."""
        layout, shape = self.layout, self.basis.shape
        times = 4.0 * (1 + (self.repeated == 1)) + (6 if self.backward else 0)
        if shape.is_moe:
            times /= 2  # experts exchange tokens instead
        sent = times * 2 * self.tokens * shape.hidden_size * (layout.tensor - 1) / layout.tensor
        return sent * shape.num_layers / layout.pipeline / self.basis.between(layout.tensor)

    def expert(self) -> float:
        """Return the time for sending each token to its experts and back; the network carries tokens that
        leave the linked GPUs."""
        layout, shape, hardware = self.layout, self.basis.shape, self.basis.hardware
        near = min(1.0, hardware.linked / layout.expert)
        seconds = (near / hardware.link + (1 - near) / hardware.network) / self.basis.reached.link
        sent = 2 * self.exchanges * 2 * shape.experts_per_token * shape.hidden_size * self.tokens
        share_sent = (layout.expert - 1) / layout.expert
        return sent / layout.tensor * share_sent * seconds * shape.moe_layers / layout.pipeline

    def context(self, attention: float) -> float:
        """Return the time of context parallelism that is not hidden. Keys and values are sent while attention
        computes; delta nets wait for other ranks' data."""
        layout, basis = self.layout, self.basis
        if layout.context == 1:
            return 0.0
        group = layout.tensor * layout.context
        start, rate = basis.hardware.start(group), basis.between(group)
        layers, hops = sum(basis.shape.full_attention) / layout.pipeline, layout.context - 1
        sent = 2 * sum(kv_elements_by_window(basis.shape).values()) / layout.pipeline * self.tokens
        around = hops * (3 if self.backward else 1) * sent / layout.tensor / rate
        around += hops * (1 + self.backward) * layers * self.micro_batches * start
        delta_nets = 0.0
        if basis.shape.is_recurrent:
            bytes_, messages = self._states_passed() if layout.passes_states else self._heads_exchanged()
            delta_nets = bytes_ / rate + messages * self.micro_batches * start
        return max(0.0, around - attention) + self.exchanges * delta_nets

    def _states_passed(self) -> tuple[float, float]:
        """Return (bytes, messages per micro-batch) of a forward pass. A state in fp32 goes from chunk to
        chunk of each sequence, and the last tokens of both chunks of a rank go to all others."""
        layout, shape = self.layout, self.basis.shape
        mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
        hops = context_chunks(layout.context) - 1
        bytes_per_sequence = hops * 4 * sum(mixer.recurrent_state for mixer in mixers)
        bytes_per_sequence += (layout.context - 1) * 2 * 2 * sum(mixer.convolution_state for mixer in mixers)
        sent = self.batch.sequences / layout.data * bytes_per_sequence / layout.tensor / layout.pipeline
        return sent, (hops + 1) * self._recurrent_layers

    def _heads_exchanged(self) -> tuple[float, float]:
        """Return the same for ranks that each get some heads of all tokens."""
        layout, shape = self.layout, self.basis.shape
        elements = sum(mixer_cost(shape, layer).exchanged for layer in range(shape.num_layers))
        share_sent = (layout.context - 1) / layout.context
        sent = 2 * self.tokens * elements * share_sent / layout.tensor / layout.pipeline
        return sent, 2 * self._recurrent_layers

    @property
    def _recurrent_layers(self) -> float:
        shape = self.basis.shape
        return (shape.num_layers - sum(shape.full_attention)) / self.layout.pipeline

    def pipeline(self, busy: float) -> float:
        """Return the bubble, (p - 1) / (v m) of the work, plus the sends between stages."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        bubble = busy * (layout.pipeline - 1) / (layout.chunks * self.micro_batches / self.steps)
        sent = 2 * self.basis.shape.hidden_size * self.tokens / layout.tensor * layout.chunks
        return bubble + (2 if self.backward else 1) * sent / self.basis.between(layout.gpus)

    def data(self, computing: float) -> float:
        """Return the time for a step's gradients and weights, except for the part hidden by half of the last
        micro-batch's backward pass."""
        seconds = _REDUCED_BYTES * self.steps * collective_seconds(self.basis, self.layout)
        return max(0.0, seconds - self.steps * computing / self.micro_batches / 2)


def collective_seconds(basis: Basis, layout: Layout) -> float:
    """Return the seconds for data-parallel ranks to gather or reduce one byte per parameter."""
    dense, experts = layout.parameters(basis.shape)
    copies, holders, hardware = layout.copies, layout.expert_copies, basis.hardware
    seconds = dense * (copies - 1) / copies / hardware.collective(copies, layout.tensor)
    seconds += experts * (holders - 1) / holders / hardware.collective(holders, layout.expert)
    return seconds / basis.reached.link


def optimizer_seconds(basis: Basis, layout: Layout) -> float:
    """Return the seconds of one optimizer step."""
    num_parameters = layout.optimizer_parameters(basis.shape)
    hardware, reached = basis.hardware, basis.reached
    if layout.offload_optimizer:
        return num_parameters * (_OFFLOADED_BYTES + _ADAM_BYTES) / (hardware.host_link * reached.host)
    return num_parameters * _ADAM_BYTES / (hardware.memory_bandwidth * reached.memory)


def checkpoint_seconds(basis: Basis, layout: Layout) -> float:
    """Return the seconds for a rank to copy its weights and optimizer state into main memory."""
    num_bytes = 2 * sum(layout.parameters(basis.shape))
    if not layout.offload_optimizer:
        num_bytes += _STATE_BYTES * layout.optimizer_parameters(basis.shape)
    return num_bytes / (basis.hardware.host_link * basis.reached.host)


@lru_cache(maxsize=256)
def _activation_bytes(
    shape: ModelShape, tensor: int, context: int, delta_net_cp: Literal["state", "heads"]
) -> float:
    """Return the bytes that all layers write per token of a rank; as many are read."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, context_parallel_size=context, delta_net_cp=delta_net_cp
    )
    return 2 * sum(kept_elements(shape, parallel, layer, (), 1.0) for layer in range(shape.num_layers))


# ------------------------------------------------------------------------------------------- sampling


def sample(
    basis: Basis,
    engine: Engine,
    lengths: Sequence[float] | np.ndarray,
    *,
    times: float = 1.0,
    prompt: float = 0.0,
    group: int = 1,
    concurrency: int | None = None,
) -> Sampled:
    """Return the time for one engine to write responses in their order.

    Args:
        lengths: tokens of responses.
        times: number of responses that each length represents.
        prompt: tokens of every prompt.
        group: responses per prompt, which share its cache except on hybrid models.
        concurrency: requests in flight at once; None: all.

    Raises:
        ValueError: memory cannot hold a sequence.
    """
    written = np.asarray(lengths, np.float64)
    if len(written) == 0:
        return Sampled(seconds=0.0, prompts=0.0, tail=0.0, tokens=0.0, mean_running=0.0, slots=0)
    shared = 1 if basis.shape.is_recurrent else group
    context = float((written**2).mean() / written.mean()) / 2  # of a running sequence, on average
    slots = engine_slots(basis, engine, prompt / shared + float(written.mean()) / 2 + context)
    slots = min(slots, concurrency or slots)
    room = max(1, round(slots / times))
    steps, running = np.array(list(_stretches(written.tolist(), room))).T
    spent = steps * decode_seconds(basis, engine, running * times, prompt + context)
    prompts = prompt_seconds(basis, engine, prompt) / shared * times * len(written)
    seconds = float(spent.sum()) + prompts
    return Sampled(
        seconds=seconds,
        prompts=prompts,
        tail=float(spent[running < room / 2].sum()),
        tokens=float(written.sum() * times),
        mean_running=float((spent * running).sum() * times) / seconds,
        slots=slots,
    )


def _stretches(lengths: Sequence[float], room: int) -> Iterator[tuple[float, int]]:
    """Yield (steps, sequences running) from one response's end to the next, at most `room` at once."""
    waiting, ends, step = iter(lengths), list[float](), 0.0
    for length in waiting:
        heapq.heappush(ends, step + length)
        if len(ends) == room:
            yield ends[0] - step, room
            step = heapq.heappop(ends)
    for running, end in zip(range(len(ends), 0, -1), sorted(ends), strict=True):
        yield end - step, running
        step = end


def decode_seconds(basis: Basis, engine: Engine, running: Any, context: float) -> Any:
    """Return the seconds of a step that writes one token of each of `running` sequences (array or float).

    Args:
        context: tokens before the written one, on average.
    """
    shape, reached, count = basis.shape, basis.reached, weight_count(basis.shape)
    bandwidth = engine.tensor * basis.hardware.memory_bandwidth * reached.memory
    read: Any = count.layers * engine.weight_bytes + 2 * count.table
    if shape.is_moe:
        touched = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
        read = read + count.experts * touched * engine.weight_bytes
    products = 2 * running * (count.layers + count.chosen + count.table) / _engine_rate(basis, engine)
    caches = running * (cache_bytes(shape, engine, context) + 2 * _recurrent_bytes(shape))
    on_gpus = (
        np.maximum(read / bandwidth, products)
        + caches / bandwidth
        + shape.num_layers * reached.engine_layer
        + _sums_seconds(basis, engine, running)
        + 2 * shape.num_layers * (engine.tensor > 1) * basis.hardware.start(engine.tensor)
    )
    on_host = running * reached.engine_sequence
    return np.maximum(on_gpus, on_host)


def prompt_seconds(basis: Basis, engine: Engine, tokens: float) -> float:
    """Return the seconds for reading one prompt among others."""
    count, (per_token, per_pair) = weight_count(basis.shape), mixer_flops(basis.shape)
    work = tokens * (2 * (count.layers + count.chosen) + per_token)
    work += sum(flops * seen_pairs(tokens, window) for window, flops in per_pair.items())
    return work / _engine_rate(basis, engine) + float(_sums_seconds(basis, engine, tokens))


def engine_slots(basis: Basis, engine: Engine, tokens: float) -> int:
    """Return the number of sequences of `tokens` tokens that run at once. Raises ValueError if memory cannot
    hold one of them with the weights."""
    count, hardware = weight_count(basis.shape), basis.hardware
    matrices = count.layers + count.experts
    weights = matrices * engine.weight_bytes + 2 * (count.total - matrices)
    free = engine.tensor * (hardware.memory_gib * GIB * engine.memory_share - _WORKSPACE) - weights
    fitting = free / (cache_bytes(basis.shape, engine, tokens) + _recurrent_bytes(basis.shape))
    if fitting < 1:
        raise ValueError(
            f"{engine.tensor} GPUs of {hardware.name} do not hold the weights ({weights / GIB:.0f} GiB) "
            f"and a sequence of {tokens:.0f} tokens"
        )
    return min(engine.most_running, int(fitting))


def cache_bytes(shape: ModelShape, engine: Engine, tokens: float) -> float:
    """Return the bytes of a sequence's keys and values on all GPUs."""
    return engine.tensor * engine.cache_bytes * cached_elements(shape, tokens, engine.tensor)


def _recurrent_bytes(shape: ModelShape) -> float:
    mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
    return 2.0 * sum(mixer.recurrent_state + mixer.convolution_state for mixer in mixers)


def _engine_rate(basis: Basis, engine: Engine) -> float:
    return engine.tensor * basis.peak(engine.precision) * basis.reached.prefill


def _sums_seconds(basis: Basis, engine: Engine, tokens: Any) -> Any:
    """Return the seconds for an engine's GPUs to all-reduce results, twice per layer."""
    bytes_per_token = 2 * 2 * basis.shape.hidden_size * (engine.tensor - 1) / engine.tensor
    return 2 * basis.shape.num_layers * bytes_per_token * tokens / basis.between(engine.tensor)


def update_seconds(
    basis: Basis, transport: Literal["gathered", "resharded", "ipc"], *, engine_tensor: int, gpus: int
) -> float:
    """Return the seconds of a weight update.

    Args:
        transport: gathered: every whole tensor to all engines; resharded: to each GPU its part; ipc: to each
            GPU its part, on its own node.
        gpus: GPUs of trainers and engines.
    """
    weight_bytes, hardware = 2 * weight_count(basis.shape).total, basis.hardware
    sent = weight_bytes if transport == "gathered" else weight_bytes / engine_tensor
    rate = hardware.link if transport == "ipc" else hardware.between(gpus)
    return sent / (rate * basis.reached.update)
