"""The settings of vLLM: flags and recipe keys of runs whose engine is vLLM."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_ibpo.config import COUNT, RolloutConfig, built
from megatron_ibpo.config.ranges import BYTES, NAMED_VALUES, SECONDS, SHARE


@dataclass(frozen=True)
class VllmParameters:
    """Settings of vLLM's engines."""

    vllm_arg: Annotated[tuple[str, ...], NAMED_VALUES] = ()
    """Any other argument of vLLM's engine, as name=value with the names of its EngineArgs; in a recipe also a
    mapping."""
    vllm_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of sampling. auto: the trainer's on GPUs and float32 on CPUs, but bfloat16 where vLLM does
    not support float32: with quantization, and on CPUs for models with delta nets."""
    vllm_gpu_memory_utilization: Annotated[float, SHARE] = 0.6
    """Share of a GPU's memory for weights and KV cache of a colocated engine."""
    vllm_kv_cache_bytes: Annotated[int | None, BYTES] = None
    """KV-cache bytes per engine rank. None: 512 MiB on CPUs, where vLLM's default would take a share of all
    RAM; on GPUs --vllm-gpu-memory-utilization decides."""
    vllm_max_num_seqs: Annotated[int, COUNT] = 256
    """Sequences decoded at once by one engine."""
    vllm_enforce_eager: bool = False
    """Disable compilation and graph capture. Always disabled on CPUs, where compiling was 20x slower."""
    ibpo_draft_from_prompt: Literal["auto", "on", "off"] = "auto"
    """Let vLLM draft tokens of corrections from their prompts, which hold the texts that they correct;
    rejection sampling leaves the distribution as it is. On GPUs vLLM then drafts for all requests. "auto": on
    GPUs, for models without delta nets, with --ibpo-operator compare-and-correct; off on CPUs. Refused for
    delta nets on CPUs."""
    vllm_start_timeout: Annotated[float | None, SECONDS] = None
    """Seconds that an engine may take to start. None: 600, for compiling and capturing graphs, plus the time
    to read the model's files at 0.25 GB/s; 1,240 for 160 GB."""


def vllm_parameters(rollout: RolloutConfig) -> VllmParameters:
    """Return vLLM's settings in a run; defaults for those that the run's engine does not declare."""
    parameters: VllmParameters = built(VllmParameters, rollout.parameters)
    return parameters
