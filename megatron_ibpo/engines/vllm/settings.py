"""The settings of vLLM, as flags and recipe keys, the choice between its model runners, and what follows from
them: the settings of an engine; the memory that it needs, estimated with allowances that are not measured;
the models that its CPU kernels cannot compute; and the samples whose probabilities it does not describe.
Importing this loads no vLLM."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from megatron_ibpo.config import COUNT, Config, RolloutConfig, built, eval_sampling, named_values
from megatron_ibpo.config.values import BYTES, NAMED_VALUES, SECONDS, SHARE, declared_fields, declared_values
from megatron_ibpo.engines.protocol import EngineNeeds, EngineSettings, Precision
from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.qwen3_next import DeltaNetShape
from megatron_ibpo.weights.transfer.link import TransportName

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
    """Raise RuntimeError if vLLM did not take its second runner, and it is needed; vLLM's log says why."""
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


# ---------------------------------------------------------------------------------- the settings of an engine

START_S = 600.0
"""Seconds that an engine may take to start, in addition to reading its weights."""
READ_BYTES_PER_S = 0.25e9
"""Bytes of weights read per second from a disk that many nodes read at once."""

DRAFT_FLAG = "--ibpo-draft-from-prompt"
SPECULATION: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
"""vLLM's speculative_config for drafts of corrections from their prompts. A correction rewrites a text that
stands in its own prompt: vLLM looks up the last tokens that were written, proposes what followed them there,
and computes all proposals in one step. Its rejection sampling leaves the distribution of every token as it
is. On CPUs only requests that are marked are drafted (`fixes`); vLLM's second model runner, on GPUs, drafts
for all."""
FLAG = "--vllm-arg"
OURS = {
    "model": "--hf-checkpoint",
    "dtype": "--vllm-dtype",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "max_model_len": "--rollout-max-context-len",
    "max_num_seqs": "--vllm-max-num-seqs",
    "kv_cache_memory_bytes": "--vllm-kv-cache-bytes",
    "gpu_memory_utilization": "--vllm-gpu-memory-utilization",
    "enforce_eager": "--vllm-enforce-eager",
    "enable_sleep_mode": "--colocate",
    "seed": "--seed",
    "skip_tokenizer_init": None,
    "logprobs_mode": None,
    "disable_log_stats": None,
    "per_request_spec_decode_metrics": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "language_model_only": None,
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "return_sampling_mask": "--rollout-top-k",
    "generation_config": None,
    "override_generation_config": "--rollout-temperature, --rollout-top-p and --rollout-top-k",
}
"""Argument that every engine is given anyway → the flag that sets it; None: it follows from other
settings."""

RECURRENT_CACHE_ON_CPU: dict[str, Any] = {"enable_chunked_prefill": True, "prefix_match_unit": 64}
"""Arguments of vLLM's prefix cache for models with delta nets. A state is kept at a prompt's last multiple of
64 tokens, where the prompt is cut in two. vLLM's own places, every block of its cache, are 128 or 256 tokens
apart for the tiny models, too far for most prompts. 64: what its kernel for CPUs reads at a time."""

ONLINE_QUANTIZATION = (
    "fp8_per_tensor",
    "fp8_per_channel",
    "fp8_per_block",
    "fp8",
    "mxfp8",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
)
"""Quantizations that vLLM applies itself whenever it loads unquantized weights, also in an update. "fp8" is
its older name for the first."""


def engine_settings(
    rollout: RolloutConfig,
    hf_dir: Path,
    shape: ModelShape,
    transport: TransportName,
    *,
    gpus: tuple[int, ...],
    num_threads: int,
    records_sampling_mask: bool = False,
) -> EngineSettings:
    """Return the settings of one engine of this run, with `records_sampling_mask` to record the ids that
    top-k and top-p leave, for training. Raises ValueError if the checkpoint names no end-of-sequence token,
    or --vllm-arg cannot be used."""
    from megatron_ibpo.data.tokenizer import read_eos_token_ids  # the engine's own process needs none of data

    on_cpu = transport == "gloo"
    recorded = shape.num_experts if rollout.use_rollout_routing_replay else 0
    parameters = vllm_parameters(rollout)
    assert parameters.vllm_dtype != "auto"  # `on_device` resolved it
    drafts = parameters.ibpo_draft_from_prompt == "on"
    arguments = _taking_new_weights(
        vllm_arguments(parameters.vllm_arg), experts_on_gpu=shape.is_moe and not on_cpu
    )
    if drafts and "speculative_config" in arguments:
        raise ValueError(f"{DRAFT_FLAG} on: --vllm-arg speculative-config drafts too; drop one of the two")
    if drafts:
        arguments["speculative_config"] = SPECULATION
    by_cache = recorded > 0 and uses_second_runner("cpu" if on_cpu else "cuda")
    if recorded and not by_cache and not on_cpu:
        raise ValueError(
            f"--use-rollout-routing-replay: on GPUs vLLM's first model runner ({VARIABLE}=0) does not record "
            "routing; unset the variable"
        )
    prefix_caching = arguments.pop("enable_prefix_caching", None)
    if prefix_caching is None:  # with delta nets it has not been run on GPUs
        prefix_caching = not shape.is_recurrent or by_cache
    if by_cache and not prefix_caching:
        raise ValueError(
            "--vllm-arg enable_prefix_caching=false: on GPUs vLLM records routing by the blocks of its "
            "prefix cache; leave it out, or --use-rollout-routing-replay"
        )
    if prefix_caching and on_cpu and shape.is_recurrent:
        arguments = RECURRENT_CACHE_ON_CPU | arguments
    if on_cpu and shape.is_recurrent and "speculative_config" in arguments:
        # vLLM 0.32: log-probs are NaN from the second token on, greedy tokens change, and there is no error
        raise ValueError(
            f"{_named(drafts)}: on CPUs vLLM's speculative decoding samples wrongly from "
            "models with delta nets; leave it out, or speculate on GPUs"
        )
    if on_cpu and recorded and "speculative_config" in arguments:
        # a position may be computed for a draft that is rejected, and the record keeps its first choice
        raise ValueError(
            "--use-rollout-routing-replay: on CPUs routing is not recorded while vLLM speculates; leave "
            f"{_named(drafts)} out"
        )
    return EngineSettings(
        model=str(hf_dir),
        eos_token_ids=read_eos_token_ids(hf_dir),
        device="cpu" if on_cpu else "cuda",
        gpus=gpus,
        tensor_parallel_size=rollout.rollout_num_gpus_per_engine,
        num_threads=num_threads,
        transport=transport,
        dtype=parameters.vllm_dtype,
        max_model_len=rollout.rollout_max_context_len,
        max_num_seqs=parameters.vllm_max_num_seqs,
        kv_cache_bytes=kv_cache_bytes(rollout, on_gpu=not on_cpu),
        gpu_memory_utilization=parameters.vllm_gpu_memory_utilization,
        enforce_eager=on_cpu or parameters.vllm_enforce_eager,
        sleep_mode=transport == "ipc",
        prefix_caching=prefix_caching,
        recompute_kv_after_update=rollout.recompute_kv_after_update,
        stall_timeout=rollout.engine_stall_timeout,
        recorded_experts=recorded,
        dense_layers=shape.dense_layers,
        records_sampling_mask=records_sampling_mask,
        drafts="speculative_config" in arguments,
        drafts_with_mtp=drafts_with_mtp(parameters.vllm_arg),
        drafts_corrections=drafts,
        extra_arguments=arguments,
    )


def _named(drafts: bool) -> str:
    return f"{DRAFT_FLAG} on" if drafts else "--vllm-arg speculative-config"


def drafts_with_mtp(vllm_arg: Sequence[str]) -> bool:
    """Return whether --vllm-arg has engines draft with the policy's multi-token prediction layer."""
    chosen = yaml.safe_load(named_values(vllm_arg).get("speculative_config", "{}"))
    method = chosen.get("method") if isinstance(chosen, dict) else None
    return isinstance(method, str) and method.endswith("mtp")


def _taking_new_weights(arguments: dict[str, Any], *, experts_on_gpu: bool) -> dict[str, Any]:
    """Return `arguments`, if an engine with them can take a trainer's weights."""
    quantization = arguments.get("quantization")
    if quantization is not None and quantization not in ONLINE_QUANTIZATION:
        raise ValueError(
            f"--vllm-arg quantization={quantization}: it loads weights that are quantized already, and "
            "trainers send unquantized ones; vLLM itself can quantize those with "
            f"{', '.join(ONLINE_QUANTIZATION)}"
        )
    if quantization == "fp8_per_channel" and experts_on_gpu:
        # vLLM 0.32 takes CUTLASS, whose strides are recreated with new weights and dropped by sleep, while
        # CUDA graphs keep reading the old ones (vLLM issue 41670). Not run on GPUs
        return {"moe_backend": "triton"} | arguments
    return arguments


def start_timeout(rollout: RolloutConfig, hf_dir: Path) -> float:
    """Return the seconds that an engine may take to start; by default from the size of the model's files."""
    if (timeout := vllm_parameters(rollout).vllm_start_timeout) is not None:
        return timeout
    weights = sum(file.stat().st_size for file in hf_dir.glob("*.safetensors"))
    return START_S + weights / READ_BYTES_PER_S


def vllm_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the values of --vllm-arg name=value by name, with the type that vLLM declares: text, a number, a
    truth value or a list. Values of vLLM's own types are parsed as YAML. Raises ValueError if there is no
    such argument, this project sets it itself, or the value is of another type."""
    if not pairs:
        return {}
    try:
        fields = declared_fields("vllm", "engine/arg_utils.py", "EngineArgs")
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None
    follows = "it follows from the model and the device"
    instead = {name: f"use {flag}" if flag else follows for name, flag in OURS.items()}
    return declared_values(FLAG, pairs, fields, instead, library="vLLM", of="EngineArgs")


# --------------------------------------------------------------------------- memory, models and probabilities

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
    """Return the memory needs of an engine with this resolved configuration (`engines.registry.on_device`).
    On CPUs its KV cache is in main memory."""
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
    and --vllm-dtype to the trainer's precision, which `config` has resolved, on GPUs and to float32 on CPUs.
    Where vLLM does not support float32 (quantized weights, and delta nets on CPUs), it is bfloat16."""
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
    Its second model runner records them, in an engine all of whose requests have top-k."""
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
    `rollout` is resolved (`on_device`)."""
    if on_gpu:
        return []
    problems = []
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
