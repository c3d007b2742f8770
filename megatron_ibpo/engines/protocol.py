"""The protocol of engines: a stream of requests in, a stream of finished samples out; and an engine's plain
data: the settings that its process receives at its start, and its memory needs."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from megatron_ibpo.basics.records import Sample, SampleRequest
from megatron_ibpo.weights.transfer.link import TransportName


class EngineError(RuntimeError):
    """An engine cannot do what was requested."""


class EngineStartError(EngineError):
    """The engine did not start; the message ends with the last lines of vLLM's own log."""


class EngineDiedError(EngineError):
    """The engine ended or stopped answering; the message ends with the last lines of its log."""


class EngineLostError(EngineError):
    """The engine ended and cannot be replaced for now; the others can go on."""


def too_old(present: object, version: int) -> str:
    """Return why an engine with the weights of policy `present` refuses requests for those of `version`."""
    return f"asked to sample with policy version {version}, the engine has {present}"


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


class AsyncEngine(Protocol):
    """One engine, wherever it runs. The caller numbers its requests; samples come back under these numbers in
    any order."""

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add requests to the running ones, to be sampled with the weights of policy `version` or later.
        Raises EngineDiedError if the engine is gone."""

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return what has finished since the last call. Wait at most `timeout` seconds for the first sample;
        return an empty list if none came.

        Raises:
            EngineDiedError: the engine is gone, and all that it had finished has been taken; or it had
                requests and wrote nothing for too long.
            EngineError: it refuses the requests, and is unchanged: its weights are older.
        """

    async def abort(self, numbers: Collection[int]) -> None:
        """Drop these requests: they take no more computation and their samples never come."""

    async def kill(self, reason: str) -> None:
        """End an engine that has stopped working, by force if it does not answer; `take` then raises
        EngineDiedError with the reason."""


class Engine(Protocol):
    """One engine in the process that owns it. A run's processes build it as `Class(settings, log,
    is_restart)`: its `EngineSettings`, the path of its log, and whether it replaces one that died.
    `parameters`, a dataclass of its flags, and its static methods `make_settings`, `start_timeout`, `needs`
    and `precision` take the place of vLLM's, and `model_problems` says why it cannot compute a model
    (`engines.registry`).

    A sample's log-probs are those of the distribution that was sampled from. A class that fills in
    `Sample.sampling_mask` where top-k or top-p cut it (`SampleRequest.is_cut`) has a static method
    `sampling_mask_obstacle(config, on_gpu)`, which returns None, or why it does not for these settings;
    without it a run whose loss reads the log-probs of such samples is refused.

    Any thread may call any method. An engine in a training run also answers the calls of a weight update
    (`weights.transfer.link.WeightReceiver`), and `sleep` and `wake` if it shares the trainers' GPUs.
    """

    def wait_ready(self, timeout: float) -> None:
        """Wait until the engine can take requests. Raises EngineStartError if it does not start within
        `timeout` seconds."""

    def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        """Add numbered requests, as `AsyncEngine.submit`."""

    def take(self, timeout: float) -> list[tuple[int, Sample]]:
        """Return what has finished since the last call, as `AsyncEngine.take`."""

    def abort(self, numbers: Collection[int]) -> None:
        """Drop these requests."""

    def generate(self, requests: Sequence[SampleRequest], *, version: int, timeout: float) -> list[Sample]:
        """Return one sample for each request, in order; call it only while no other request runs."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Start a control call without waiting for its answer."""

    def result(self, timeout: float) -> Any:
        """Return the answer to the call that `begin` started."""

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call `begin`, then `result`."""

    def kill(self, reason: str | None = None) -> None:
        """End the engine at once, with everything it started."""

    def close(self) -> None:
        """Stop the engine in order. No process of it remains."""


@dataclass(frozen=True, slots=True)
class ThreadedEngine:
    """A `engines.AsyncEngine` whose blocking calls wait in threads."""

    engine: Engine

    async def submit(self, requests: Sequence[tuple[int, SampleRequest]], version: int) -> None:
        await asyncio.to_thread(self.engine.submit, requests, version)

    async def take(self, timeout: float) -> list[tuple[int, Sample]]:
        return await asyncio.to_thread(self.engine.take, timeout)

    async def abort(self, numbers: Collection[int]) -> None:
        await asyncio.to_thread(self.engine.abort, numbers)

    async def kill(self, reason: str) -> None:
        await asyncio.to_thread(self.engine.kill, reason)
