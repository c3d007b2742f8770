"""Plain data of an engine: the settings that its process receives at its start, and its memory needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_ibpo.weights.transfer.link import TransportName


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine. By default it is one process on CPUs."""

    model: str
    """Directory of the model in Hugging Face format."""
    eos_token_ids: tuple[int, ...]
    """Sampling stops after one of these ids; if empty, only at the requested length."""
    num_threads: int
    """OpenMP threads of each of the engine's workers on CPUs."""
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int | None
    """Most tokens of prompt and response together; None: the model's own limit."""
    max_num_seqs: int
    stall_timeout: float
    """Seconds within which an engine with requests must write a token."""
    device: Literal["cpu", "cuda"] = "cpu"
    gpus: tuple[int, ...] = ()
    """Indices among the owner's visible GPUs; empty on CPUs."""
    tensor_parallel_size: int = 1
    spans_nodes: bool = False
    """True if its GPUs are on several nodes of a Ray cluster."""
    transport: TransportName = "gloo"
    """Transport of weight updates."""
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.0
    enforce_eager: bool = True
    sleep_mode: bool = False
    """True to free the GPU's memory between rollouts."""
    prefix_caching: bool = False
    recompute_kv_after_update: bool = True
    """True to recompute the KV cache of running requests when new weights arrive."""
    recorded_experts: int = 0
    """Number of experts per layer, to record the routers' choices for each token. 0: no record."""
    dense_layers: int = 0
    """Number of first layers without a router."""
    records_sampling_mask: bool = False
    """True to record the ids that top-k and top-p leave to sample from (`Sample.sampling_mask`)."""
    drafts: bool = False
    """True if it drafts tokens before it samples them; `call("drafts")` then counts drafted and accepted
    ones."""
    drafts_with_mtp: bool = False
    """True if it drafts with the policy's multi-token prediction layer, and so takes its weights too."""
    drafts_corrections: bool = False
    """True to draft for requests that repeat their prompt (`SampleRequest.repeats_prompt`), and on CPUs only
    for those."""
    extra_arguments: Mapping[str, Any] = field(default_factory=dict)
    """--vllm-arg: further arguments of vLLM's EngineArgs, by name."""


@dataclass(frozen=True)
class Precision:
    """The number format that an engine samples with."""

    dtype: Literal["auto", "bfloat16", "float32"]
    """"auto" until the device is known (`engines.registry.on_device`)."""
    is_quantized: bool = False
    """True if weights or KV cache have fewer bits than `dtype`."""


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """The memory that one engine takes on each of its GPUs, and the flags that change it.

    The planner computes with these figures, and knows no engine by name.
    """

    memory_share: float
    """Share of a GPU's memory for weights, KV cache and workspace. It must be free when an engine starts."""
    memory_share_flag: str
    kv_cache_bytes: int | None
    """Bytes of the KV cache; None: the rest of the share."""
    kv_cache_flag: str
    most_running: int
    """Largest number of sequences at once."""
    most_running_flag: str
    element_bytes: int
    """Bytes per element of activations, embeddings, keys, values and convolution states."""
    matrix_bytes: float
    """Bytes per element of the layers' matrices."""
    state_bytes: int
    """Bytes per element of recurrent states."""
    prefill_tokens: int
    """Largest number of prompt tokens in one step."""
    logit_bytes: int
    """Bytes per logit while tokens are sampled."""
    buffer_bytes: int
    """Workspaces of kernels."""
    graph_bytes: int
    """CUDA graphs, which stay while an engine sleeps."""
    communicators: int
    """Number of NCCL communicators among the GPUs of an engine that has several."""
