"""Seconds of training passes: a roofline of what is computed, what ranks send, the pipeline's bubble.

Under context parallelism keys and values go around behind attention, and delta nets pass their states or
share out their heads.

Sources of the terms: operations as `models.cost` counts them; recomputation, the pipeline's bubble
(p - 1) / (v m) and the volumes of tensor, sequence and pipeline parallelism from Narayanan et al.
(arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198); sharded state from Rajbhandari et al. (arXiv
1910.02054). Nothing is hidden behind computation but what the names say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.cost import kept_elements, mixer_cost, mixer_flops, seen_pairs, weight_count
from megatron_ibpo.models.layout import context_chunks
from megatron_ibpo.plan.efficiencies import Efficiencies
from megatron_ibpo.plan.hardware import Hardware

_BACKWARD = 2.0
"""Operations of a backward pass over those of the forward pass, in products with weights."""
_ATTENTION_BACKWARD = 2.5
"""The same in flash attention, which computes the scores anew (Dao, arXiv 2307.08691)."""
_SELECTIVE = 0.35
"""Share of the forward pass that selective recomputation repeats: every second product, in torchtitan."""
_OLD_ATTENTION = 0.6
"""FlashAttention 2 over 3 on Hopper and later: the latter is 1.5 to 2 times as fast (Shah et al., arXiv
2407.08608)."""
_WITH_STATES = 2.0
"""The rule of delta nets, over what it takes without context parallelism: it goes over values and, as wide as
these, over what a state would change."""
_ACCUMULATED = 8
"""Bytes of a parameter's gradient in fp32 that each micro-batch reads and writes."""
_ADAM_BYTES = 26
"""Of a parameter in an optimizer step: gradient, master weight and two means read, the latter three written,
and the weight in bf16."""
_HOST_BYTES = 6
"""Of a parameter between GPU and main memory where the optimizer steps there: gradient out, weight back."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a trainer lies on its GPUs, and what its passes do."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    """Pieces of the model that each pipeline stage holds."""
    fsdp: bool = False
    """Weights are shared over the data-parallel ranks too and gathered layer by layer."""
    precision: str = "bf16"
    """bf16, fp8 or mxfp8, of products; attention stays in bf16."""
    recompute: str = "none"
    """none, selective or full."""
    offload_optimizer: bool = False
    delta_net_cp: Literal["state", "heads"] = "state"
    """state: ranks that share a sequence pass states; heads: they exchange what delta nets take and give."""
    micro_batch: int
    """Tokens of a micro-batch, over all its context-parallel ranks."""
    balanced_experts: bool = False
    attention: int = 3
    """Of FlashAttention."""

    @property
    def data(self) -> int:
        """Copies of the model that share the batch."""
        return max(1, self.gpus // (self.tensor * self.pipeline * self.context))

    @property
    def copies(self) -> int:
        """Ranks that have the same parameters outside the experts, or share them out under FSDP."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        """The same of the experts. FSDP shares these over all of the others' ranks."""
        return self.copies if self.fsdp else max(1, self.gpus // (self.expert * self.pipeline))

    @property
    def parallel(self) -> ParallelConfig:
        """What a layer keeps depends on this."""
        return ParallelConfig(tensor_model_parallel_size=self.tensor, expert_model_parallel_size=self.expert)

    @property
    def passes_states(self) -> bool:
        """Whether delta nets do."""
        return self.context > 1 and self.delta_net_cp == "state"


@dataclass(frozen=True)
class Batch:
    """What a pass goes over."""

    lengths: tuple[float, ...]
    times: float = 1.0
    """How many sequences each of them stands for."""

    @classmethod
    def of(cls, lengths: Sequence[float] | npt.NDArray[np.float64]) -> "Batch":
        return cls(tuple(map(float, lengths)))

    def scaled(self, share: float) -> "Batch":
        return Batch(self.lengths, self.times * share)

    @property
    def tokens(self) -> float:
        return self.times * sum(self.lengths)

    @property
    def sequences(self) -> float:
        return self.times * len(self.lengths)

    def pairs(self, window: int | None) -> float:
        """Of a token and one that it sees, itself among them."""
        return self.times * _pairs(self.lengths, window)


@lru_cache(maxsize=256)
def _pairs(lengths: tuple[float, ...], window: int | None) -> float:
    return sum(seen_pairs(length, window) for length in lengths)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one pass over a batch with the optimizer step after it, where there is one, by what takes
    them. They add up."""

    products: float
    attention: float
    elementwise: float
    tensor: float
    """Activations between tensor-parallel ranks."""
    expert: float
    """Tokens between the ranks of the experts, both ways."""
    context: float
    pipeline: float
    """Between stages, and the bubble."""
    data: float
    """Gradients and weights between data-parallel ranks, where computation does not hide them."""
    optimizer: float
    layers: float
    """Where computing waits for what starts it: a layer takes `Efficiencies.train_layer` at least, or that
    much more where nothing is started ahead."""

    @property
    def total(self) -> float:
        return sum(self.named().values())

    def named(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def largest(self) -> str:
        """What takes most."""
        named = self.named()
        return max(named, key=named.__getitem__)


def pass_time(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    reached: Efficiencies,
    batch: Batch,
    *,
    backward: bool = True,
    steps: int = 1,
) -> PassTime:
    """Forward passes over a batch, and with `backward` the backward passes and so many optimizer steps.

    Micro-batches are as full as sequences of the mean length make them.
    """
    count, parts = weight_count(shape), layout.gpus
    again = {"none": 0.0, "selective": _SELECTIVE, "full": 1.0}[layout.recompute] if backward else 0.0
    passes = 1 + again + (_BACKWARD if backward else 0)
    micro_batches = _micro_batches(layout, batch, steps)
    rank_tokens = batch.tokens / (layout.data * layout.context)

    factor = reached.on(hardware.generation)
    peak = hardware.peak_bf16 * factor
    dense_rate = peak * reached.matmul
    if layout.precision != "bf16":
        dense_rate = hardware.peak_fp8 * factor * reached.matmul_fp8
    expert_rate = dense_rate * reached.experts / reached.matmul
    routing = 1.0 if layout.balanced_experts or layout.expert == 1 else reached.routing
    per_token, per_pair = mixer_flops(shape)
    products = (
        2
        * batch.tokens
        * passes
        / parts
        * (count.layers / dense_rate + count.table / (peak * reached.matmul))
        + 2 * batch.tokens * passes / parts * count.chosen * routing / expert_rate
    )
    old = _OLD_ATTENTION if layout.attention < 3 else 1.0
    attention_passes = 1 + (1.0 if again == 1 else 0.0) + (_ATTENTION_BACKWARD if backward else 0)
    met = sum(flops * batch.pairs(window) for window, flops in per_pair.items())
    attention = attention_passes * met / parts / (peak * reached.attention * old)
    rule = _WITH_STATES if layout.passes_states else 1.0
    attention += rule * passes * per_token * batch.tokens / parts / (peak * reached.attention)
    even, twice = _kept(shape, layout.tensor, layout.context, layout.delta_net_cp)
    kept = even + (twice - even) * (routing - 1)
    weights = sum(own_parameters(shape, layout)) * micro_batches
    elementwise = 2 * 2 * kept * rank_tokens / layout.pipeline * passes
    elementwise += weights * (2 * (1 + again) + (2 + _ACCUMULATED if backward else 0))
    elementwise /= hardware.memory_bandwidth * reached.elementwise
    layers = shape.num_layers / layout.pipeline
    least = reached.train_layer * layers * micro_batches * passes
    computing = products + attention + elementwise

    tensor = _tensor_seconds(shape, layout, hardware, reached, rank_tokens, backward, again)
    expert = _expert_seconds(shape, layout, hardware, reached, rank_tokens, backward, again) * routing
    around = _context_seconds(shape, layout, hardware, reached, rank_tokens, micro_batches, backward)
    passed = 1 + (again == 1) + backward
    context = max(0.0, around - attention)
    context += passed * _delta_net_seconds(shape, layout, hardware, reached, batch, micro_batches)
    waiting = max(0.0, least - computing) if hardware.starts_ahead else least
    busy = computing + tensor + expert + context + waiting
    bubble = busy * (layout.pipeline - 1) / (layout.chunks * micro_batches / steps)
    boundary = 0.0
    if layout.pipeline > 1:
        sent = 2 * shape.hidden_size * rank_tokens / layout.tensor * (2 if backward else 1) * layout.chunks
        boundary = sent / (hardware.between(layout.gpus) * reached.link)
    data, optimizer = 0.0, 0.0
    if backward or layout.fsdp:
        data = _data_seconds(shape, layout, hardware, reached, micro_batches, steps, computing, backward)
    if backward:
        optimizer = steps * _optimizer_seconds(shape, layout, hardware, reached)
    return PassTime(
        products=products,
        attention=attention,
        elementwise=elementwise,
        tensor=tensor,
        expert=expert,
        context=context,
        pipeline=bubble + boundary,
        data=data,
        optimizer=optimizer,
        layers=waiting,
    )


def own_parameters(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """(parameters of a GPU outside the experts, in the experts), not counting what FSDP shares out."""
    count = weight_count(shape)
    dense = (count.total - count.experts) / (layout.tensor * layout.pipeline)
    return dense, count.experts / (layout.expert * layout.pipeline)


def own_state(shape: ModelShape, layout: Layout) -> float:
    """Parameters whose optimizer state a GPU has."""
    dense, experts = own_parameters(shape, layout)
    return dense / layout.copies + experts / layout.expert_copies


@lru_cache(maxsize=256)
def _kept(
    shape: ModelShape, tensor: int, context: int, delta_net_cp: Literal["state", "heads"]
) -> tuple[float, float]:
    """Elements that all layers write for each token on a rank, where its experts get an even share of tokens
    and twice that; as many are read."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, context_parallel_size=context, delta_net_cp=delta_net_cp
    )
    layers = range(shape.num_layers)
    even, twice = (sum(kept_elements(shape, parallel, i, (), share) for i in layers) for share in (1.0, 2.0))
    return even, twice


def _micro_batches(layout: Layout, batch: Batch, steps: int) -> float:
    """Of each data-parallel rank, over all steps. On average half a sequence does not fit into one."""
    tokens = batch.tokens / layout.data
    mean = batch.tokens / batch.sequences
    fill = layout.micro_batch if mean >= layout.micro_batch else layout.micro_batch - mean / 2
    if layout.micro_batch % mean < 1e-9:
        fill = layout.micro_batch
    return max(float(steps), tokens / max(fill, mean))


def _tensor_seconds(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    reached: Efficiencies,
    tokens: float,
    backward: bool,
    again: float,
) -> float:
    """Gathers and scatters of sequence parallelism around attention and MLP: 4 in a forward pass, and 6 in a
    backward pass, which gathers the input once more for the gradient of the weights."""
    if layout.tensor == 1:
        return 0.0
    times = 4.0 * (1 + (again == 1)) + (6 if backward else 0)
    if shape.is_moe:
        times /= 2  # experts exchange tokens instead
    sent = times * 2 * tokens * shape.hidden_size * (layout.tensor - 1) / layout.tensor
    return sent * shape.num_layers / layout.pipeline / (hardware.between(layout.tensor) * reached.link)


def _expert_seconds(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    reached: Efficiencies,
    tokens: float,
    backward: bool,
    again: float,
) -> float:
    """Each token to its experts and back. What leaves the linked GPUs goes over the network."""
    if layout.expert == 1:
        return 0.0
    times = 2 * (1 + (again == 1) + (1 if backward else 0))
    chosen = times * 2 * shape.experts_per_token * shape.hidden_size * tokens / layout.tensor
    near = min(1.0, hardware.linked / layout.expert)
    seconds = near / hardware.link + (1 - near) / hardware.network
    share = (layout.expert - 1) / layout.expert
    return chosen * share * seconds * shape.moe_layers / layout.pipeline / reached.link


def _context_seconds(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    reached: Efficiencies,
    tokens: float,
    micro_batches: float,
    backward: bool,
) -> float:
    """Keys and values of all other ranks, and in the backward pass again with their gradients."""
    layers, hops = sum(shape.full_attention) / layout.pipeline, layout.context - 1
    elements = 2 * shape.num_key_value_heads * shape.head_dim * layers
    group = layout.tensor * layout.context
    rate = hardware.between(group) * reached.link
    sending = (3 if backward else 1) * 2 * elements * tokens / layout.tensor / rate
    return hops * (sending + (1 + backward) * layers * micro_batches * hardware.start(group))


def _delta_net_seconds(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    reached: Efficiencies,
    batch: Batch,
    micro_batches: float,
) -> float:
    """What ranks that share sequences send for their delta nets, in one pass. Nothing hides it."""
    if layout.context == 1 or not shape.is_recurrent:
        return 0.0
    if layout.passes_states:
        sent, messages = _states_passed(shape, layout, batch.sequences / layout.data)
    else:
        sent, messages = _heads_exchanged(shape, layout, batch.tokens / (layout.data * layout.context))
    group = layout.tensor * layout.context
    return sent / (hardware.between(group) * reached.link) + messages * micro_batches * hardware.start(group)


def _states_passed(shape: ModelShape, layout: Layout, sequences: float) -> tuple[float, float]:
    """(bytes, messages of a micro-batch) that a rank passes on in the forward pass for its delta nets
    (`models.delta_net.state_passing`): from chunk to chunk of each sequence a state in fp32, one hop after
    the other, and the last tokens of both chunks of a rank to all others; gradients of both come back.

    Args:
        sequences: of a data-parallel rank.
    """
    mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
    hops = context_chunks(layout.context) - 1
    states = hops * 4 * sum(mixer.recurrent_state for mixer in mixers)
    last_tokens = (layout.context - 1) * 2 * 2 * sum(mixer.convolution_state for mixer in mixers)
    sent = sequences * (states + last_tokens) / layout.tensor / layout.pipeline
    return sent, (hops + 1) * _recurrent_layers(shape, layout)


def _heads_exchanged(shape: ModelShape, layout: Layout, tokens: float) -> tuple[float, float]:
    """The same where ranks exchange what delta nets take and give, so that each has some heads of all tokens.

    Args:
        tokens: of a rank.
    """
    elements = sum(mixer_cost(shape, layer).exchanged for layer in range(shape.num_layers))
    away = (layout.context - 1) / layout.context
    sent = 2 * tokens * elements * away / layout.tensor / layout.pipeline
    return sent, 2 * _recurrent_layers(shape, layout)


def _recurrent_layers(shape: ModelShape, layout: Layout) -> float:
    """Of a pipeline stage."""
    return (shape.num_layers - sum(shape.full_attention)) / layout.pipeline


def _data_seconds(
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    reached: Efficiencies,
    micro_batches: float,
    steps: int,
    computing: float,
    backward: bool,
) -> float:
    """Without FSDP: gradients in fp32 are reduced and weights gathered once a step, behind the backward pass
    of the last micro-batch. With it: weights are gathered in every pass, behind computation; pipeline stages
    gather them once a step."""
    dense, experts = own_parameters(shape, layout)
    copies = layout.copies
    holders = max(1, layout.gpus // (layout.expert * layout.pipeline))  # of the same experts
    seconds = dense * (copies - 1) / copies / hardware.collective(copies, layout.tensor)
    seconds += experts * (holders - 1) / holders / hardware.collective(holders, layout.expert)
    seconds /= reached.link
    if layout.fsdp:
        each = 2 * (2 if backward else 1) + (4 if backward else 0)
        gathers = micro_batches if layout.pipeline == 1 else steps  # a stage keeps what it has gathered
        return max(0.0, seconds * each * gathers - computing)
    hidden = steps * computing / micro_batches / 2
    return max(0.0, seconds * steps * 6 - hidden)


def _optimizer_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, reached: Efficiencies) -> float:
    own = own_state(shape, layout)
    if not layout.offload_optimizer:
        return own * _ADAM_BYTES / (hardware.memory_bandwidth * reached.elementwise)
    return own * (_HOST_BYTES / (hardware.host_link * reached.host) + _ADAM_BYTES / reached.host_adam)
