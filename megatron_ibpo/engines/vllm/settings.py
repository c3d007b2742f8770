"""The settings of a vLLM engine, from the configuration, the model and the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ibpo.config import RolloutConfig, named_values
from megatron_ibpo.config.values import declared_fields, declared_values
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.engines.settings import EngineSettings
from megatron_ibpo.engines.vllm.needs import VARIABLE, kv_cache_bytes, uses_second_runner, vllm_parameters
from megatron_ibpo.models import ModelShape
from megatron_ibpo.weights.transfer.link import TransportName

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
    """Return the settings of one engine of this run.

    Args:
        records_sampling_mask: record the ids that top-k and top-p leave, for training.

    Raises:
        ValueError: the checkpoint names no end-of-sequence token, or --vllm-arg cannot be used.
    """
    on_cpu = transport == "gloo"
    recorded = shape.num_experts if rollout.use_rollout_routing_replay else 0
    parameters = vllm_parameters(rollout)
    assert parameters.vllm_dtype != "auto"  # `needs.on_device` resolved it
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
    if prefix_caching is None:
        # With delta nets it has not been run on GPUs
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
    timeout = vllm_parameters(rollout).vllm_start_timeout
    if timeout is not None:
        return timeout
    weights = sum(file.stat().st_size for file in hf_dir.glob("*.safetensors"))
    return START_S + weights / READ_BYTES_PER_S


def vllm_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the values of --vllm-arg name=value by name, with the type that vLLM declares: text, a number, a
    truth value or a list. Values of vLLM's own types are parsed as YAML.

    Raises:
        ValueError: no such argument, one that this project sets itself, or a value of another type.
    """
    if not pairs:
        return {}
    try:
        fields = declared_fields("vllm", "engine/arg_utils.py", "EngineArgs")
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None
    instead = {
        name: f"use {flag}" if flag else "it follows from the model and the device"
        for name, flag in OURS.items()
    }
    return declared_values(FLAG, pairs, fields, instead, library="vLLM", of="EngineArgs")
