"""Bytes on one GPU, estimated: what training, sampling and the weight update take of it.

Weights, gradients and optimizer state are counted exactly. Activations, logits and the engine's workspace
are estimates from the tensors that a layer keeps for its backward pass with Transformer Engine, flash
attention and flash-linear-attention; the allowances below stand for what no formula gives.
"""

from dataclasses import dataclass

from megatron_ibpo.config import Config
from megatron_ibpo.loss import CHUNK_ROWS
from megatron_ibpo.models import ModelShape, pipeline_layers
from megatron_ibpo.models.cost import kept_elements, mixer_cost
from megatron_ibpo.plan.census import Census, StagePart
from megatron_ibpo.policy.overrides import optimizer_bytes

GIB = 1024**3
CONTEXT_BYTES = int(1.5 * GIB)
"""CUDA context, NCCL buffers and allocator fragments of one process."""
ENGINE_WORKSPACE_BYTES = 3 * GIB
"""vLLM's activations, sampler buffers and CUDA graphs."""
_LOSS_CHUNK_BYTES = 4 * 64 * 1024**2
"""fp32 statistics of the loss, which goes through the logits in chunks."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one trainer rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    """And what the loss holds beside them."""

    @property
    def resident(self) -> int:
        """What stays through the whole run."""
        return self.weights + self.gradients + self.optimizer + CONTEXT_BYTES

    @property
    def training(self) -> int:
        """The peak of a forward and backward pass."""
        return self.resident + self.activations + self.logits


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace


def rank_memory(
    shape: ModelShape, config: Config, part: StagePart, census: Census, max_tokens: int
) -> RankMemory:
    """A trainer rank with micro-batches of up to `max_tokens` tokens."""
    element = 2 if config.model.bf16 else 4
    state = optimizer_bytes(config).device
    dense, experts = part.dense, part.experts
    if config.parallel.use_distributed_optimizer:
        dense = -(-dense // census.data_parallel)
        experts = -(-experts // census.expert_data_parallel)
    stages = config.parallel.pipeline_model_parallel_size
    # a critic is a second model of about this size; its activations are gone before the policy's begin
    models = 2 if config.algorithm.advantages == "critic" else 1
    return RankMemory(
        weights=models * part.parameters * element,
        gradients=models * part.parameters * 4,
        optimizer=round(models * (dense + experts) * state),
        activations=_activations(shape, config, part, max_tokens),
        logits=_logits(shape, config, max_tokens, element) if part.pipeline == stages - 1 else 0,
    )


def _logits(shape: ModelShape, config: Config, max_tokens: int, element: int) -> int:
    """Logits of a micro-batch; with the LM head fused those of a chunk, and two fp32 gradients of the head:
    its own, and that of the sequence which the chunk leaves open."""
    columns = shape.vocab_size // config.parallel.tensor_model_parallel_size
    if config.loss.fuse_lm_head:
        return min(max_tokens, CHUNK_ROWS) * columns * element + 2 * columns * shape.hidden_size * 4
    return max_tokens * columns * element + _LOSS_CHUNK_BYTES


def engine_memory(config: Config, census: Census, gpu_bytes: int) -> EngineMemory:
    """One GPU of an engine; the KV cache is what was asked for, or what the utilization leaves."""
    rollout = config.rollout
    element = _engine_element(config)
    weights = census.total * element // rollout.rollout_num_gpus_per_engine
    asked = rollout.vllm_kv_cache_bytes
    if asked is None:
        budget = int(rollout.vllm_gpu_memory_utilization * gpu_bytes)
        asked = max(0, budget - weights - ENGINE_WORKSPACE_BYTES)
    return EngineMemory(weights=weights, kv_cache=asked, workspace=ENGINE_WORKSPACE_BYTES + CONTEXT_BYTES)


def kv_bytes_per_token(shape: ModelShape, config: Config) -> int:
    """KV cache of one token on one GPU of an engine; key/value heads are copied where TP exceeds them."""
    heads = max(1, shape.num_key_value_heads // config.rollout.rollout_num_gpus_per_engine)
    return sum(shape.full_attention) * 2 * heads * shape.head_dim * _engine_element(config)


def state_bytes_per_sequence(shape: ModelShape, config: Config) -> int:
    """Recurrent (fp32) and convolution state of one sequence on one GPU of an engine."""
    mixers = [mixer_cost(shape, layer) for layer in range(shape.num_layers)]
    recurrent = 4 * sum(mixer.recurrent_state for mixer in mixers)
    convolution = _engine_element(config) * sum(mixer.convolution_state for mixer in mixers)
    return (recurrent + convolution) // config.rollout.rollout_num_gpus_per_engine


def sync_bytes(census: Census, config: Config) -> tuple[int, int]:
    """(bytes one engine receives in a weight update, extra bytes on a GPU while it lasts).

    The weights travel in the trainer's dtype. The largest tensor is gathered whole, and a bucket exists
    twice: filling up on the trainer's side, being loaded on the engine's.
    """
    element = 2 if config.model.bf16 else 4
    whole, largest = census.total * element, census.largest * element
    bucket = min(whole, max(config.rollout.update_weight_buffer_size, largest))
    return whole, largest + 2 * bucket


def _engine_element(config: Config) -> int:
    dtype = config.rollout.vllm_dtype
    return 4 if dtype == "float32" or (dtype == "auto" and not config.model.bf16) else 2


def _activations(shape: ModelShape, config: Config, part: StagePart, tokens: int) -> int:
    """What is kept for the backward pass at its fullest, and the layer that is being worked on."""
    stages = config.parallel.pipeline_model_parallel_size
    element = 2 if config.model.bf16 else 4
    in_flight = stages - part.pipeline  # micro-batches that 1F1B keeps alive on this stage
    (layers,) = pipeline_layers(shape.num_layers, config.parallel)[part.pipeline]
    layer_bytes = [kept_elements(shape, config.parallel, layer) * tokens * element for layer in layers]
    working = 2.0 * max(layer_bytes)  # a layer's tensors and their gradients
    if config.model.recompute_granularity != "full":
        return int(in_flight * sum(layer_bytes) + working)
    tensor = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    kept = shape.hidden_size * tokens * element / tensor
    chunk = min(config.model.recompute_num_layers, part.layers)
    if config.model.recompute_method == "block":
        return int(in_flight * (chunk * kept + sum(layer_bytes[chunk:])) + working)
    chunks = -(-part.layers // chunk)
    return int(in_flight * chunks * kept + (chunk - 1) * max(layer_bytes) + working)
