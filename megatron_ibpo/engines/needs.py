"""GPU memory of an engine: the planner counts with it and knows no engine by name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """The memory that one engine takes on each of its GPUs, and the flags that change it."""

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
