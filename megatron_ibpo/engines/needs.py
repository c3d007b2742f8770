"""What an engine takes of its GPUs: the planner counts memory with it and knows no engine by name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """What one engine takes on each of its GPUs, and the flags that change it."""

    memory_share: float
    """Share of a GPU's memory for weights, KV cache and workspace. A starting engine wants it free."""
    memory_share_flag: str
    kv_cache_bytes: int | None
    """Bytes of the KV cache; None: what the share leaves."""
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
    """NCCL communicators among the GPUs of an engine that has several."""
