"""Settings that an engine gets at its start: plain data, sent to its process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_ibpo.weights.transfer.update_order import TransportName


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine."""

    model: str
    """Directory in Hugging Face format."""
    eos_token_ids: tuple[int, ...]
    """Sampling stops after one of these; with none, at the asked length only."""
    device: Literal["cpu", "cuda"]
    gpus: tuple[int, ...]
    """Numbers among the owner's visible GPUs; empty on CPUs."""
    tensor_parallel_size: int
    num_threads: int
    """OpenMP threads of each of the engine's workers on CPUs."""
    transport: TransportName
    """Transport of weight updates."""
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int | None
    """Tokens of prompt and response together; the model's own limit when None."""
    max_num_seqs: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    sleep_mode: bool
    """Give the GPU's memory back between rollouts."""
    prefix_caching: bool
    recompute_kv_after_update: bool
    """Requests that run when new weights come are computed anew with them."""
    stall_timeout: float
    """Seconds in which an engine that has requests must write a token."""
    recorded_experts: int = 0
    """Record which of so many experts the routers of every layer choose for each token. 0: nothing."""
    dense_layers: int = 0
    """Number of first layers without a router."""
    extra_arguments: Mapping[str, Any] = field(default_factory=dict)
    """--vllm-arg: further arguments of vLLM's EngineArgs, by name."""
