"""Bytes on one GPU, and in a node's main memory, for training, saving, the weight update and sampling.

Weights, gradients and optimizer state are counted exactly. Activations, logits and the engine's workspace are
estimates from the tensors that a layer keeps for its backward pass with Transformer Engine, flash attention
and flash-linear-attention; the allowances below stand for parts without a formula. None of it has been
compared with a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.engines.protocol import EngineNeeds
from megatron_ibpo.loss import CHUNK_ROWS
from megatron_ibpo.models import ModelShape, padded_vocab_size, pipeline_layers
from megatron_ibpo.models.cost import (
    cached_elements,
    inference_elements,
    kept_elements,
    kv_elements,
    largest_module,
    mixer_cost,
)
from megatron_ibpo.plan.parameter_count import Census, Place, StagePart
from megatron_ibpo.policy.overrides import Overrides
from megatron_ibpo.weights.formats.run_state import checkpoint_bytes

GIB = 1024**3
CONTEXT_BYTES = int(0.75 * GIB)
"""Memory of one process on a GPU: CUDA's context, the kernels of torch and its libraries, cuBLAS'
workspaces."""
COMMUNICATOR_BYTES = int(0.4 * GIB)
"""NCCL's buffers of one communicator: 4 MiB and more for each of its channels, protocols and directions. With
the context that makes 3 to 5 GiB for the eight to ten communicators of a large layout."""
FRAGMENTED = 0.05
"""Share of a training pass's temporary memory that torch's allocator holds in fragments too small for
reuse."""
_GATHERED_BYTES = 12
"""Bytes per parameter of optimizer state in a checkpoint: the parameter and Adam's two means, in fp32."""
_GATHERING_BYTES = 4
"""Bytes per parameter in transit, while one of these is gathered; the sender and the receiver each hold as
many (`policy.gathering`)."""
MOVED_OUT = "trainers' state while engines sample"
"""Purpose of main memory, pinned, for what leaves the GPUs."""
_LOSS_CHUNK_BYTES = 4 * 64 * 1024**2
"""fp32 statistics of the loss, which processes the logits in chunks."""


@dataclass(frozen=True)
class RankState:
    """Bytes that one trainer rank holds from its start to its end."""

    weights: int
    gradients: int
    optimizer: int
    host_optimizer: int
    """Optimizer state in main memory (--optimizer-cpu-offload)."""
    moves_out: bool
    """True if weights, gradients and optimizer state leave the GPU while engines sample."""

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class RankMemory(RankState):
    """Bytes on one trainer rank: its state, and what comes and goes."""

    activations: int
    logits: int
    """Logits, with the memory of the loss on them."""
    without_gradient: int
    """Activations and logits of a pass without a gradient, of --log-probs-max-tokens-per-gpu tokens."""
    second_gradients: int
    """The gradient meter's sum, in steps that measure."""
    process: int
    """CUDA context and communicators."""
    copies: int
    """FP8 copies of weights, which stay."""

    @property
    def resident(self) -> int:
        """Bytes between two passes."""
        return self.state + self.process + self.copies

    @property
    def fragments(self) -> int:
        return int(FRAGMENTED * (self.activations + self.logits))

    @property
    def training(self) -> int:
        """Peak of a forward and backward pass."""
        return self.resident + self.second_gradients + self.activations + self.logits + self.fragments

    @property
    def inferring(self) -> int:
        """Peak of a pass without a gradient, as before the first optimizer step of an update."""
        return self.resident + int((1 + FRAGMENTED) * self.without_gradient)

    @property
    def updating(self) -> int:
        """Bytes while weights are sent."""
        return self.process + self.copies + (self.weights if self.moves_out else self.state)

    @property
    def resting(self) -> int:
        """Bytes while engines sample."""
        return self.process + self.copies + (0 if self.moves_out else self.state)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: int
    kv_cache: int
    workspace: int
    """Activations of the longest step, logits, buffers of kernels."""
    loading: int
    """Bytes for loading during a weight update: an engine collects a whole module to load its shard."""
    asleep: int
    """Bytes that sleep does not free: CUDA context, communicators and graphs."""

    @property
    def sampling(self) -> int:
        return self.weights + self.kv_cache + self.workspace + self.asleep

    @property
    def updating(self) -> int:
        """Bytes during a weight update. Weights wake first; the KV cache follows when the new ones are
        loaded."""
        return self.weights + self.loading + self.asleep


def rank_state(config: Config, overrides: Overrides, part: StagePart, census: Census) -> RankState:
    """Return the state of a trainer rank, which does not depend on its micro-batches."""
    optimizer = overrides.optimizer_bytes
    sharded = _shard(census, part) if config.parallel.use_distributed_optimizer else part.trained
    models = config.algorithm.num_models
    return RankState(
        weights=models * part.parameters * _trainer_element(config),
        gradients=models * part.trained * 4,
        optimizer=round(models * sharded * optimizer.device),
        host_optimizer=round(models * sharded * optimizer.host),
        moves_out=config.rollout.colocate and config.rollout.offload_train,
    )


def rank_memory(
    shape: ModelShape, config: Config, overrides: Overrides, part: StagePart, census: Census, max_tokens: int
) -> RankMemory:
    """Return the memory of a trainer rank with micro-batches of up to `max_tokens` tokens."""
    element, stages = _trainer_element(config), config.parallel.pipeline_model_parallel_size
    pieces = pipeline_layers(shape.num_layers, config.parallel, overrides.chunks)[part.pipeline]
    layers = [layer for piece in pieces for layer in piece]
    widest = max(kept_elements(shape, config.parallel, layer) for layer in layers)
    groups = communicators(shape, config, census)
    return RankMemory(
        **vars(rank_state(config, overrides, part, census)),
        activations=_activations(shape, config, overrides, part, layers, widest, max_tokens),
        logits=_logits(shape, config, max_tokens, element) if part.pipeline == stages - 1 else 0,
        without_gradient=_without_gradient(shape, config, part, widest, max_tokens),
        second_gradients=0 if config.run.gradient_meter_interval is None else part.trained * 4,
        process=CONTEXT_BYTES + len(groups) * COMMUNICATOR_BYTES,
        copies=config.algorithm.num_models * _weight_copies(shape, config.parallel, overrides.model, part),
    )


def _weight_copies(
    shape: ModelShape, parallel: ParallelConfig, model: Mapping[str, Any], part: StagePart
) -> int:
    """Return the bytes of FP8 copies of the layers' matrices and of their transposes, one byte per element
    each. Transformer Engine keeps them from the first micro-batch of a step on, unless parameters are FP8
    themselves or disable_parameter_transpose_cache is set (transformer_engine/pytorch/module/linear.py).
    Embeddings and head have no copies. Not seen on a GPU."""
    if not model.get("fp8") or model.get("fp8_param") or model.get("disable_parameter_transpose_cache"):
        return 0
    ends = (part.pipeline == 0) + (part.pipeline == parallel.pipeline_model_parallel_size - 1)
    if shape.tie_word_embeddings:
        ends = min(ends, 1)
    table = padded_vocab_size(shape, parallel) * shape.hidden_size // parallel.tensor_model_parallel_size
    return 2 * (part.parameters - ends * table)


def communicators(shape: ModelShape, config: Config, census: Census) -> dict[str, int]:
    """Return the NCCL communicators that a trainer uses, by purpose, with the ranks of each: Megatron's
    groups of more than one rank, one over all ranks that gathers weights, and one with engines on other
    GPUs."""
    parallel, world = config.parallel, census.world_size
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    experts, expert_tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    # gradient norms: over the ranks that share a gradient, or with sharded state over all
    sharded = parallel.use_distributed_optimizer
    groups = {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": parallel.context_parallel_size,
        "data": census.data_parallel,
        "gradient norm": world if sharded else tensor * pipeline,
        "all": world,
    }
    if shape.tie_word_embeddings:
        groups["embeddings"] = min(2, pipeline)
    if shape.is_moe:
        groups |= {
            "expert": experts,
            "expert tensor": expert_tensor,
            "experts of a layer": experts * expert_tensor,
            "expert data": census.expert_data_parallel,
        }
        if not sharded:
            groups["expert gradient norm"] = experts * expert_tensor * pipeline
    if not config.rollout.colocate:
        groups["engines"] = 2
    return {name: size for name, size in groups.items() if size > 1}


def _logits(shape: ModelShape, config: Config, max_tokens: int, element: int) -> int:
    """Return the bytes of a micro-batch's logits. With the LM head fused this is a chunk of logits and two
    fp32 gradients of the head: the sum so far, and the part of the sequence that the chunk leaves open. With
    adapters the head has no gradient."""
    columns = padded_vocab_size(shape, config.parallel) // config.parallel.tensor_model_parallel_size
    if config.loss.fuse_lm_head:
        gradients = 0 if config.model.lora_rank else 2 * columns * shape.hidden_size * 4
        return min(max_tokens, CHUNK_ROWS) * columns * element + gradients
    return max_tokens * columns * element + _LOSS_CHUNK_BYTES


def engine_memory(
    shape: ModelShape, config: Config, needs: EngineNeeds, census: Census, gpu_bytes: int
) -> EngineMemory:
    """Return the memory of one GPU of an engine. The KV cache has its configured size, or the rest of the
    share.

    Args:
        needs: of the engine on such a device (`engines.registry.engine_needs`).
        gpu_bytes: memory of the GPU; 0 on CPUs.
    """
    size = config.rollout.rollout_num_gpus_per_engine
    weights = _engine_weights(shape, census.total, size, needs)
    workspace = int(needs.prefill_tokens * inference_elements(shape, size)) * needs.element_bytes
    workspace += needs.most_running * shape.vocab_size * needs.logit_bytes + needs.buffer_bytes
    groups = (needs.communicators if size > 1 else 0) + (not config.rollout.colocate)
    asleep = CONTEXT_BYTES + groups * COMMUNICATOR_BYTES + needs.graph_bytes
    cache = needs.kv_cache_bytes
    if cache is None:
        cache = max(0, int(needs.memory_share * gpu_bytes) - weights - workspace - asleep)
    # vllm/model_executor/model_loader/reload/layerwise.py collects modules whole
    module_bytes = largest_module(shape) * _trainer_element(config)
    return EngineMemory(weights, cache, workspace, loading=module_bytes + module_bytes // size, asleep=asleep)


def host_memory(
    config: Config, census: Census, stages: Sequence[RankState], ranks_per_node: int
) -> dict[str, int]:
    """Return `node_memory` of the node that needs most, among nodes with as many ranks each."""
    firsts = range(0, census.world_size, ranks_per_node)
    nodes = [node_memory(config, census, stages, range(rank, rank + ranks_per_node)) for rank in firsts]
    return max(nodes, key=lambda node: sum(node.values()))


def node_memory(
    config: Config, census: Census, stages: Sequence[RankState], ranks: Sequence[int]
) -> dict[str, int]:
    """Return the large parts of the main memory of a node with GPUs and these trainers: bytes by purpose, for
    display. Sleeping engines keep nothing there; programs, data and Ray's object store come on top.

    Args:
        stages: state of a rank of each pipeline stage.
    """
    places = [census.place(rank) for rank in ranks]
    states = [stages[place.pipeline] for place in places]
    reference = config.loss.kl_coef > 0
    return {
        MOVED_OUT: sum((rank.weights + rank.optimizer) * rank.moves_out for rank in states),
        "a checkpoint being written": _checkpoint_copies(config, census, places) if config.run.save else 0,
        "the reference policy": sum(
            map(partial(_reference, config, census), states, places) if reference else ()
        ),
        "the optimizer": sum(rank.host_optimizer for rank in states),
    }


def _reference(config: Config, census: Census, rank: RankState, place: Place) -> int:
    """Return the bytes of the reference policy that are stored for a rank: only the trained parameters, if
    the two policies differ only in these."""
    if config.model.lora_rank is None or config.model.ref_load is not None:
        return rank.weights // config.algorithm.num_models
    return census.stages[place.pipeline].trained * _trainer_element(config)


def _checkpoint_copies(config: Config, census: Census, places: Sequence[Place]) -> int:
    """Return the bytes of a checkpoint that a node holds until it is written. The state of a sharded
    optimizer is gathered on the first rank of each data-parallel group; the ranks share everything
    besides."""
    if not config.parallel.use_distributed_optimizer:
        checkpoint = checkpoint_bytes(census.trained, bf16=bool(config.model.bf16))
        return config.algorithm.num_models * checkpoint * len(places) // census.world_size
    weights = census.trained * _trainer_element(config) * len(places) // census.world_size
    parts = [(place, census.stages[place.pipeline]) for place in places]
    gathered = sum(
        part.trained_dense * (place.data == 0) + part.trained_experts * (place.expert_data == 0)
        for place, part in parts
    )
    sent = sum(_shard(census, part) for _, part in parts)
    stored = config.algorithm.num_models * (weights + _GATHERED_BYTES * gathered)
    return stored + _GATHERING_BYTES * (gathered + sent)


def _shard(census: Census, part: StagePart) -> int:
    """Return the number of parameters whose optimizer state a rank has when data-parallel ranks share it."""
    experts = -(-part.trained_experts // census.expert_data_parallel)
    return -(-part.trained_dense // census.data_parallel) + experts


def _engine_weights(shape: ModelShape, total: int, size: int, needs: EngineNeeds) -> int:
    """Return the bytes of an engine's weights on each of `size` GPUs. Routers are copied to all of them."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    routers = shape.moe_layers * shape.num_experts * shape.hidden_size
    matrices = total - embeddings - routers
    element = needs.element_bytes
    return (int(matrices * needs.matrix_bytes) + embeddings * element) // size + routers * element


def kv_bytes(shape: ModelShape, needs: EngineNeeds, size: int, tokens: int) -> int:
    """Return the bytes of the KV cache of a sequence of `tokens` tokens on one of an engine's `size` GPUs."""
    return int(cached_elements(shape, tokens, size)) * needs.element_bytes


def state_bytes_per_sequence(shape: ModelShape, needs: EngineNeeds, size: int) -> int:
    """Return the bytes of recurrent and convolution state of one sequence on each of `size` GPUs."""
    mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
    recurrent = needs.state_bytes * sum(mixer.recurrent_state for mixer in mixers)
    convolution = needs.element_bytes * sum(mixer.convolution_state for mixer in mixers)
    return (recurrent + convolution) // size


def sync_bytes(census: Census, config: Config) -> tuple[int, int]:
    """Return (bytes one engine receives in a weight update, extra bytes on a GPU during it).

    The weights are sent in the trainer's dtype. The largest tensor is gathered whole, and a bucket exists
    twice: being filled on the trainer's side, being loaded on the engine's.
    """
    element = _trainer_element(config)
    model_bytes, largest_bytes = census.total * element, census.largest * element
    bucket = min(model_bytes, max(config.rollout.update_weight_buffer_size, largest_bytes))
    return model_bytes, largest_bytes + 2 * bucket


def _trainer_element(config: Config) -> int:
    return 2 if config.model.bf16 else 4


def _activations(
    shape: ModelShape,
    config: Config,
    overrides: Overrides,
    part: StagePart,
    layers: Sequence[int],
    widest: float,
    tokens: int,
) -> int:
    """Return the peak bytes kept for the backward pass, plus the working memory of the present layer.

    Args:
        layers: of the stage, in all its chunks.
        widest: elements per token of the largest layer, with nothing recomputed.
    """
    parallel, element = config.parallel, _trainer_element(config)
    tensor_ranks = parallel.tensor_model_parallel_size
    in_flight = _in_flight(overrides, parallel.pipeline_model_parallel_size, part.pipeline)
    recomputed = overrides.recomputed_modules
    layer_bytes = [kept_elements(shape, parallel, layer, recomputed) * tokens * element for layer in layers]
    working = 2.0 * (widest * tokens * element)  # a layer's tensors and their gradients
    working += _gathered(shape, parallel, tokens) * element
    if parallel.context_parallel_size > 1:
        # keys, values and their gradients: those in use by attention, and those arriving from another rank
        keys = max(kv_elements(shape, layer, tensor_ranks) for layer in range(shape.num_layers))
        working += 2 * 2 * tokens * keys * element
    # Autograd gives a weight's gradient in its own dtype, before it is added to the fp32 buffer: that of the
    # largest weight, or of all experts of a layer, whose first matrices are two thirds of them.
    if config.model.lora_rank is None:
        working += (
            max(part.largest, part.experts // max(1, sum(map(shape.has_experts, layers))) * 2 // 3) * element
        )
    if config.model.recompute_granularity != "full":
        return int(in_flight * sum(layer_bytes) + working)
    input_bytes = shape.hidden_size * tokens * element / (tensor_ranks if parallel.sequence_parallel else 1)
    chunk = min(config.model.recompute_num_layers, part.layers)
    if config.model.recompute_method == "block":
        return int(in_flight * (chunk * input_bytes + sum(layer_bytes[chunk:])) + working)
    chunks = -(-part.layers // chunk)
    return int(in_flight * chunks * input_bytes + (chunk - 1) * max(layer_bytes) + working)


def _in_flight(overrides: Overrides, stages: int, stage: int) -> float:
    """Return the most micro-batches that 1F1B keeps alive on a stage: those after their forward pass and
    before their backward pass. With interleaving, a micro-batch in one of the rank's chunks counts as a share
    of one."""
    chunks = overrides.chunks
    if chunks == 1:
        return stages - stage
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * overrides.micro_batch_multiple
    return (ahead + 1) / chunks


def _without_gradient(
    shape: ModelShape, config: Config, part: StagePart, widest: float, max_tokens: int
) -> int:
    """Return the bytes of one layer's tensors, and on the last stage of logits and loss."""
    tokens = max(max_tokens, config.model.tokens_without_gradient)
    element = _trainer_element(config)
    gathered = _gathered(shape, config.parallel, tokens)
    is_last = part.pipeline == config.parallel.pipeline_model_parallel_size - 1
    return int((widest * tokens + gathered) * element) + (
        _logits(shape, config, tokens, element) if is_last else 0
    )


def _gathered(shape: ModelShape, parallel: ParallelConfig, tokens: int) -> int:
    """Return the elements of a layer's whole input and of its gradient, which sequence parallelism gathers
    for a matrix product and its backward pass."""
    if parallel.tensor_model_parallel_size == 1 or not parallel.sequence_parallel:
        return 0
    return 2 * tokens * shape.hidden_size
