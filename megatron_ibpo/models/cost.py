"""Cost of a model's layers, estimated from its shape: operations of a forward pass, and memory for its
backward pass. The family defines the cost of a layer's mixer, such as attention; all else is common."""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.shape import ModelShape

COUNTED = frozenset({"core_attn", "mlp", "moe", "moe_act", "shared_experts"})
"""Parts of a layer whose recomputation is counted. Attention keeps its input and output in any case: the
operations before and after it need them, and flash attention has nothing large between."""
EXPERT_IMBALANCE = 2.0
"""Tokens of the fullest expert-parallel rank, relative to an even share."""


@dataclass(frozen=True, kw_only=True)
class MixerCost:
    """The cost of one layer's mixer, over all tensor-parallel ranks."""

    weights: int
    """Weights that a token meets in matrix products."""
    flops_per_token: int = 0
    """Operations per token beyond those products."""
    flops_per_pair: int = 0
    """Operations per pair of a token and one that it attends to, including itself."""
    window: int | None = None
    """Number of tokens that each token attends to; None: itself and all before it."""
    saved: int
    """Elements per token that the backward pass needs."""
    saved_with_states: int = 0
    """Elements per token in addition, if states are passed between ranks that share a sequence."""
    exchanged: int = 0
    """Elements per token that ranks which share a sequence exchange, if they divide the heads instead."""
    recurrent_state: int = 0
    """Elements per sequence that an engine holds in place of keys and values."""
    convolution_state: int = 0
    """Elements of the state of the short convolution before it."""


@lru_cache(maxsize=4096)
def mixer_cost(shape: ModelShape, layer: int) -> MixerCost:
    cost: MixerCost = getattr(family_module(shape.family), "mixer_cost", attention_cost)(shape, layer)
    return cost


def attention_cost(shape: ModelShape, layer: int) -> MixerCost:
    """Return the cost of softmax attention, the mixer of every layer where a family has no `mixer_cost`: a
    causal token meets itself and all before it, or a window, once for the scores and once for the values."""
    query = shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    gated = shape.attention_output_gate
    projected = query + 2 * key
    normed_and_rotated = 2 * (query + key)
    return MixerCost(
        weights=shape.hidden_size * ((2 if gated else 1) * query + 2 * key + query),
        flops_per_pair=4 * query,
        window=shape.window(layer),
        saved=projected + normed_and_rotated + query + (2 * query if gated else 0),
    )


def kv_elements(shape: ModelShape, layer: int, ranks: int = 1) -> int:
    """Return the elements of keys and values that a token leaves on each of `ranks` ranks in one layer; more
    ranks than key/value heads copy them."""
    return 2 * max(1, shape.num_key_value_heads // ranks) * shape.head_dim * shape.full_attention[layer]


@lru_cache(maxsize=64)
def kv_elements_by_window(shape: ModelShape, ranks: int = 1) -> Mapping[int | None, int]:
    """Return window → elements that a token leaves on a rank in all layers with that window."""
    elements: Counter[int | None] = Counter()
    for layer in range(shape.num_layers):
        elements[shape.window(layer)] += kv_elements(shape, layer, ranks)
    return elements


def cached_elements(shape: ModelShape, tokens: float, ranks: int = 1) -> float:
    """Return the elements of keys and values of a sequence that an engine keeps on each of `ranks` ranks.
    Layers with a window keep only that many tokens."""
    return sum(
        elements * (tokens if window is None else min(tokens, window))
        for window, elements in kv_elements_by_window(shape, ranks).items()
    )


def forward_flops(shape: ModelShape, length: int) -> float:
    """Return the floating-point operations of one causal forward pass over a sequence of `length` tokens: 2
    for each weight that a token meets in a matrix product, and the mixers'. Norms, embeddings, short
    convolutions and activations are left out."""
    count = weight_count(shape)
    per_token, per_pair = mixer_flops(shape)
    pairs = sum(flops * seen_pairs(length, window) for window, flops in per_pair.items())
    return (2 * (count.layers + count.chosen + count.table) + per_token) * length + pairs


def seen_pairs(length: float, window: int | None) -> float:
    """Return the pairs of a token and one that it attends to, including itself, in a causal sequence."""
    beyond = 0 if window is None else max(0, length - window)
    return (length * (length + 1) - beyond * (beyond + 1)) / 2


def _mlp_weights(shape: ModelShape) -> int:
    """Return the weights that a token meets in the MLPs or experts of all layers."""
    hidden = shape.hidden_size
    dense = 3 * hidden * shape.ffn_hidden_size
    experts = shape.experts_per_token * shape.expert_hidden_size + shape.shared_expert_hidden_size
    shared_gate = hidden if shape.shared_expert_hidden_size and shape.shared_expert_gate else 0
    mixture = 3 * hidden * experts + hidden * shape.num_experts + shared_gate
    return shape.moe_layers * mixture + (shape.num_layers - shape.moe_layers) * dense


def kept_elements(
    shape: ModelShape,
    parallel: ParallelConfig,
    layer: int,
    recomputed: Container[str] = (),
    imbalance: float = EXPERT_IMBALANCE,
) -> float:
    """Return the elements per token that one layer keeps for its backward pass on one rank.

    Args:
        recomputed: parts that keep their input alone, of `COUNTED`, in Megatron's words (recompute_modules).
        imbalance: tokens of the rank's experts over an even share.
    """
    tensor = parallel.tensor_model_parallel_size
    sequence = tensor if parallel.sequence_parallel else 1
    hidden = shape.hidden_size
    mixer = mixer_cost(shape, layer)
    passes_states = parallel.context_parallel_size > 1 and parallel.delta_net_cp == "state"
    # around both norms: their input, output, residual
    elements = 6 * hidden / sequence + mixer.saved / tensor
    elements += passes_states * mixer.saved_with_states / tensor
    if not shape.has_experts(layer):
        return elements + (0 if "mlp" in recomputed else 4 * shape.ffn_hidden_size / tensor)
    if "moe" in recomputed:
        return elements
    if "shared_experts" not in recomputed:
        elements += 3 * shape.shared_expert_hidden_size / tensor
    elements += 3 * 2 * shape.num_experts / sequence  # router logits and probabilities in fp32
    # each chosen expert: its input before and after the exchange, both layers, its output
    inner = 2 if "moe_act" in recomputed else 3  # without the activation's output
    routed = shape.experts_per_token * imbalance * (3 * hidden + inner * shape.expert_hidden_size)
    return elements + routed / sequence


def inference_elements(shape: ModelShape, tensor: int) -> float:
    """Return the elements per token that an engine's widest layer holds at one time, on one of `tensor` GPUs:
    residual, input and output, and the tensors of its mixer or of its MLP."""
    hidden = shape.hidden_size
    mixer = max(mixer_cost(shape, layer).saved for layer in range(shape.num_layers)) / tensor
    mlp = 3 * shape.ffn_hidden_size / tensor
    if shape.is_moe:
        # of each chosen expert: one buffer for both halves of its first product or its output, and the
        # activation's output
        inner = shape.expert_hidden_size / tensor
        chosen = shape.experts_per_token * (max(2 * inner, hidden) + inner)
        mlp = max(mlp, 3 * shape.shared_expert_hidden_size / tensor + chosen)
    return 3 * hidden + max(mixer, mlp)


def largest_module(shape: ModelShape) -> int:
    """Return the parameters of the largest module that an engine loads in one piece: the embeddings, the
    experts of a layer, or the first matrices of a dense MLP."""
    hidden = shape.hidden_size
    experts = 3 * shape.num_experts * shape.expert_hidden_size
    return hidden * max(shape.vocab_size, experts, 2 * shape.ffn_hidden_size)


@dataclass(frozen=True, kw_only=True)
class WeightCount:
    """The weights of a model's matrices; norms, biases and short convolutions are left out."""

    layers: int
    """Parameters of all layers, without the routed experts."""
    experts: int
    """Parameters of all routed experts."""
    chosen: int
    """Parameters of the experts that one token goes through."""
    table: int
    """Parameters of the embeddings, and the same again for the head."""
    tied: bool
    """True if embeddings and head share weights."""

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.table * (1 if self.tied else 2)


@lru_cache(maxsize=64)
def weight_count(shape: ModelShape) -> WeightCount:
    mixers = sum(mixer_cost(shape, layer).weights for layer in range(shape.num_layers))
    expert = 3 * shape.hidden_size * shape.expert_hidden_size
    chosen = shape.moe_layers * shape.experts_per_token * expert
    return WeightCount(
        layers=mixers + _mlp_weights(shape) - chosen,
        experts=shape.moe_layers * shape.num_experts * expert,
        chosen=chosen,
        table=shape.hidden_size * shape.vocab_size,
        tied=shape.tie_word_embeddings,
    )


@lru_cache(maxsize=64)
def mixer_flops(shape: ModelShape) -> tuple[int, Mapping[int | None, int]]:
    """Return (operations of all mixers per token besides products with weights; by window, operations per
    pair of a token and one that it attends to)."""
    mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
    per_pair: Counter[int | None] = Counter()
    for mixer in mixers:
        per_pair[mixer.window] += mixer.flops_per_pair
    return sum(mixer.flops_per_token for mixer in mixers), per_pair
