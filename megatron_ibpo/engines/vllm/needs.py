"""The settings of vLLM, as flags and recipe keys, the choice between its model runners; and what follows from
them: the memory that an engine needs, estimated with allowances that are not measured, the models that its
CPU kernels cannot compute, and the samples whose probabilities it does not describe. Importing this loads no
vLLM."""

import os
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from megatron_ibpo.config import COUNT, Config, RolloutConfig, built, eval_sampling, named_values
from megatron_ibpo.config.ranges import BYTES, NAMED_VALUES, SECONDS, SHARE
from megatron_ibpo.engines.settings import EngineNeeds, Precision
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.qwen3_next import DeltaNetShape

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def uses_second_runner(device: Literal["cpu", "cuda"]) -> bool:
    """Return whether an engine on this device samples with vLLM's second model runner.

    vLLM 0.32 takes the second where Triton has a back end: on GPUs, not on CPUs
    (`VllmConfig.use_v2_model_runner`). VLLM_USE_V2_MODEL_RUNNER=0 or 1 overrides that. The tests run the
    first one, and the second one on Triton's interpreter (tests/engines/test_second_runner.py). What this
    project assumes of each:

    | assumption | first | second |
    |---|---|---|
    | a request's seed fixes its tokens | a generator a request | noise hashed from seed and position |
    | reading a prompt in parts changes no token | with a fix (`fixes`), on CPUs | yes: noise has no state |
    | log-probs are of what was sampled from | `processed_logprobs` | `processed_logprobs` |
    | `FlatLogprobs`, spans of weight versions | yes: the engine's core makes them | as in the first |
    | the ids that top-k and top-p left | no | `return_sampling_mask`, with top-k only |
    | routers' choices | `worker.RecordingWorker`, on CPUs | `enable_return_routed_experts` |
    | steps overlap (`async_scheduling`) | not on CPUs | on GPUs |
    """
    chosen = os.environ.get(VARIABLE)
    return device == "cuda" if chosen is None else chosen == "1"


def check_runner(second: bool, needs_second: bool) -> None:
    """Refuse an engine for which vLLM took the first runner where the second is needed.

    Args:
        second: whether vLLM took the second.

    Raises:
        RuntimeError: it did not; its log says why.
    """
    if needs_second and not second:
        raise RuntimeError(
            "vLLM took its first model runner, which records neither routing nor what top-k and top-p left; "
            "its log says above what the second one does not support. Drop that, or "
            "--use-rollout-routing-replay and --rollout-top-k"
        )


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
    return built(VllmParameters, rollout.parameters)


CPU_KV_CACHE_BYTES = 512 * 1024**2
GRAPHS_BYTES = 1024**3
BUFFERS_BYTES = int(0.75 * 1024**3)
"""Workspaces of vLLM's attention, all-reduce and sampling kernels."""
PREFILL_TOKENS = 16384
"""Prompt tokens that vLLM takes in one step on an H100, unless max_num_batched_tokens is given."""
SAMPLER_BYTES = 14
"""Bytes per logit of a sampled token: the logit in bf16 and fp32, its log-probability and its probability in
fp32."""
COMMUNICATORS = 2
"""Number of communicators: torch's and vLLM's own."""


CHANGE_PROBABILITIES = {"logits_processors", "watermark_config"}
"""Arguments of vLLM by which it samples from other probabilities than the request's settings leave. Its
penalties, min-p and logit bias are settings of requests, which this project does not make."""
TOP_K = 1000
"""Suggested top-k where only top-p is wanted: it hardly cuts off more, and is recorded exactly."""
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`)."""
DELTA_NET_MULTIPLE = 32
"""The head size of delta nets must be a multiple of this (vLLM 0.32's `chunk_gated_delta_rule_cpu`)."""


def vllm_needs(config: Config, on_gpu: bool) -> EngineNeeds:
    """Return an engine's memory needs.

    Args:
        config: configuration with device-dependent values resolved (`engines.registry.on_device`).
        on_gpu: False if the engine runs on CPUs, with its KV cache in main memory.
    """
    parameters = vllm_parameters(config.rollout)
    arguments = named_values(parameters.vllm_arg)
    element = 4 if parameters.vllm_dtype == "float32" else 2
    quantization = arguments.get("quantization")
    state = arguments.get("mamba_ssm_cache_dtype", "auto")
    return EngineNeeds(
        memory_share=parameters.vllm_gpu_memory_utilization,
        memory_share_flag="--vllm-gpu-memory-utilization",
        kv_cache_bytes=kv_cache_bytes(config.rollout, on_gpu=on_gpu),
        kv_cache_flag="--vllm-kv-cache-bytes",
        most_running=parameters.vllm_max_num_seqs,
        most_running_flag="--vllm-max-num-seqs",
        element_bytes=element,
        # the layers' matrices are quantized; scales are left out
        matrix_bytes=element if quantization is None else 0.5 if "fp4" in quantization else 1,
        # vLLM keeps recurrent states in the model's dtype unless told otherwise
        state_bytes={"float32": 4, "float16": 2, "bfloat16": 2}.get(state, element),
        prefill_tokens=int(arguments.get("max_num_batched_tokens", PREFILL_TOKENS)),
        logit_bytes=SAMPLER_BYTES,
        buffer_bytes=BUFFERS_BYTES,
        graph_bytes=0 if parameters.vllm_enforce_eager or not on_gpu else GRAPHS_BYTES,
        communicators=COMMUNICATORS,
    )


def kv_cache_bytes(rollout: RolloutConfig, *, on_gpu: bool) -> int | None:
    """Return the KV-cache bytes of each rank of an engine; None: the rest of its share of the GPU."""
    return vllm_parameters(rollout).vllm_kv_cache_bytes or (None if on_gpu else CPU_KV_CACHE_BYTES)


def on_device(config: Config, shape: ModelShape, on_gpu: bool) -> RolloutConfig:
    """Return the settings of sampling with "auto" resolved: --ibpo-draft-from-prompt by `draft_by_default`,
    and --vllm-dtype to the trainer's precision on GPUs and to float32 on CPUs. Where vLLM does not support
    float32 (quantized weights, and delta nets on CPUs), it is bfloat16.

    Args:
        config: configuration with the trainer's precision resolved.
    """
    rollout, parameters = config.rollout, vllm_parameters(config.rollout)
    resolved: dict[str, Any] = {}
    if parameters.ibpo_draft_from_prompt == "auto":
        drafts = draft_by_default(config, parameters, shape, on_gpu)
        resolved["ibpo_draft_from_prompt"] = "on" if drafts else "off"
    if parameters.vllm_dtype == "auto":
        rounds = config.model.bf16 if on_gpu else shape.is_recurrent
        is_quantized = "quantization" in named_values(parameters.vllm_arg)
        resolved["vllm_dtype"] = "bfloat16" if is_quantized or rounds else "float32"
    return replace(rollout, parameters=rollout.parameters | resolved)


def draft_by_default(config: Config, parameters: VllmParameters, shape: ModelShape, on_gpu: bool) -> bool:
    """Return whether to draft without being told: on GPUs, for models whose state is a cache that can be cut
    back, if the policy corrects responses and no routing or sampling mask is recorded. Not run on GPUs."""
    rollout = config.rollout
    recorded = rollout.use_rollout_routing_replay or bool(rollout.truncation)
    chosen = "speculative_config" in named_values(parameters.vllm_arg)
    corrects = config.algorithm.ibpo_operator == "compare-and-correct"  # which marks its requests
    return on_gpu and corrects and not (shape.is_recurrent or recorded or chosen)


def precision(rollout: RolloutConfig) -> Precision:
    """Return the precision of sampling."""
    parameters = vllm_parameters(rollout)
    quantizing = {"quantization", "kv_cache_dtype"} & named_values(parameters.vllm_arg).keys()
    return Precision(parameters.vllm_dtype, bool(quantizing))


def changed_probabilities(rollout: RolloutConfig) -> list[str]:
    """Return the arguments of vLLM by which it samples from other probabilities than temperature, top-k and
    top-p leave."""
    names = named_values(vllm_parameters(rollout).vllm_arg).keys() & CHANGE_PROBABILITIES
    return [f"--vllm-arg {name}" for name in sorted(names)]


def sampling_mask_obstacle(config: Config, on_gpu: bool) -> str | None:
    """Return why vLLM does not record the ids that top-k and top-p leave, and what to do; None if it does.

    Its second model runner records them, in an engine all of whose requests have top-k.
    """
    rollout = config.rollout
    if not on_gpu and not uses_second_runner("cpu"):
        return "vLLM records what was left only on GPUs; take --rollout-backend lean"
    if on_gpu and not uses_second_runner("cuda"):
        return f"{VARIABLE}=0: vLLM's first model runner does not record what was left; unset it"
    if min([rollout.rollout_top_k, *rollout.rollout_top_k_cycle]) <= 0:
        return f"vLLM records what was left only on GPUs and with top-k; add --rollout-top-k {TOP_K} there"
    held_out, run = eval_sampling(config), config.run
    is_random = max([held_out.temperature, *run.eval_other_temperatures]) > 0
    if held_out.top_k <= 0 and is_random and run.eval_num_prompts != 0:
        return f"vLLM then needs top-k in evaluation too; set --eval-top-k {TOP_K}"
    return None


def model_problems(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> list[str]:
    """Return what vLLM cannot compute of a model, one line each; on GPUs it is taken to compute all.

    Args:
        rollout: settings with the precision resolved (`on_device`).
    """
    problems: list[str] = []
    if on_gpu:
        return problems
    if any(shape.full_attention) and shape.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        problems.append(
            f"head_dim {shape.head_dim} in config.json: vLLM's attention on CPUs supports only heads of "
            f"{sizes}; take a model with one of these, or sample on GPUs"
        )
    if isinstance(shape, DeltaNetShape) and shape.is_recurrent:
        key, value = shape.gdn_key_dim, shape.gdn_value_dim
        if key != value or key % DELTA_NET_MULTIPLE:
            problems.append(
                f"linear_key_head_dim {key} and linear_value_head_dim {value} in config.json: vLLM's CPU "
                f"kernels for delta nets need equal sizes that are multiples of {DELTA_NET_MULTIPLE}; take a "
                "model with such sizes, or sample on GPUs"
            )
        if precision(rollout).dtype == "float32":
            problems.append(
                f"--vllm-dtype float32: vLLM's CPU kernels for the delta nets of {shape.family} support "
                "bfloat16 only; leave the flag out"
            )
    return problems
