"""--model-override and --optimizer-override: any field of Megatron's TransformerConfig and OptimizerConfig by
its name, checked before anything starts and without Megatron. Their effect on a GPU has not been run."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from megatron_ibpo.config import Config
from megatron_ibpo.config.config import ENTRIES
from megatron_ibpo.config.config import flag as flag_of
from megatron_ibpo.config.values import Fields, declared_fields, declared_values

MODEL, OPTIMIZER = "--model-override", "--optimizer-override"
CHUNKS, GROUP = "virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"

_OF_THE_MODEL = "it follows from config.json of --hf-checkpoint"
_OF_THE_DEVICE = "it follows from the device"
_OF_THE_LOSS = "log-probs and their scale depend on it"
_OF_OBJECTS = "it takes a Python object, which a flag cannot express"

MODEL_OURS = {
    **dict.fromkeys(
        (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
            "kv_channels", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma",
            "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
            "qk_l2_norm", "attention_output_gate", "softmax_type", "window_size", "rotary_interleaved",
            "multi_latent_attention", "num_moe_experts", "moe_router_topk",
            "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_pre_softmax", "moe_router_score_function",
            "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_num_groups",
            "moe_router_group_topk", "moe_latent_size", "window_attn_skip_freq", "no_rope_freq", "use_mup",
            "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
            "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim",
            "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        ),
        _OF_THE_MODEL,
    ),
    **dict.fromkeys(
        (
            "transformer_impl", "moe_grouped_gemm", "use_cpu_initialization", "init_model_with_meta_device",
            "perform_initialization",
        ),
        _OF_THE_DEVICE,
    ),
    **dict.fromkeys(
        (
            "hidden_dropout", "attention_dropout", "variable_seq_lengths", "calculate_per_token_loss",
            "moe_token_dropping", "moe_expert_capacity_factor", "moe_expert_rank_capacity_factor",
            "moe_router_force_load_balancing", "moe_router_force_biased",
        ),
        _OF_THE_LOSS,
    ),
    "pipeline_model_parallel_layout": "use --decoder-first-pipeline-num-layers and "
    "--decoder-last-pipeline-num-layers",
    "num_layers_in_first_pipeline_stage": "use --decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "use --decoder-last-pipeline-num-layers",
    "fp16": "use --bf16",
    "params_dtype": "use --bf16",
    "pipeline_dtype": "use --bf16",
    "moe_enable_routing_replay": "use --use-rollout-routing-replay or --use-routing-replay",
    "moe_router_load_balancing_type": "use --moe-aux-loss-coeff",
}  # fmt: skip
"""Fields of TransformerConfig, besides those with a flag of the same name, that follow from other settings →
what to do instead. Passed on, most of them would change the result or do nothing without a word."""

OPTIMIZER_OURS = {
    "optimizer": "only AdamW is supported",
    "min_lr": "use --min-lr-ratio",
    "fp16": "use --bf16",
    "params_dtype": "use --bf16",
    "main_grads_dtype": "gradients are summed in float32",
    "overlap_param_gather_with_optimizer_step": "use --overlap-param-gather",
    "store_param_remainders": "Megatron cannot load a checkpoint of 16-bit remainders",
}
"""The same of OptimizerConfig."""


_FP32, _BF16, _FP16, _FP8 = ("float32", 4), ("bfloat16", 2), ("float16", 2), ("uint8", 1)
"""(name in torch, bytes)"""
_DTYPES = {
    "fp32": _FP32, "float32": _FP32, "bf16": _BF16, "bfloat16": _BF16, "fp16": _FP16, "float16": _FP16,
    "fp8": _FP8, "uint8": _FP8,
}  # fmt: skip
"""Data types by the names that users type. Transformer Engine's Adam takes bytes for FP8."""


def model_overrides(config: Config) -> dict[str, Any]:
    """Return the fields of TransformerConfig that --model-override sets; values of torch's and Megatron's own
    types stay text. Raises ValueError for an unknown field, one of `MODEL_OURS`, or a value of another
    type."""
    if not config.model.model_override:
        return {}
    return _values(MODEL, config.model.model_override, MODEL_OURS, "TransformerConfig")


def optimizer_overrides(config: Config) -> dict[str, Any]:
    """Return the fields of OptimizerConfig that --optimizer-override sets, as `model_overrides` does."""
    if not config.optimizer.optimizer_override:
        return {}
    values = _values(OPTIMIZER, config.optimizer.optimizer_override, OPTIMIZER_OURS, "OptimizerConfig")
    smaller = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype") if name in values]
    if smaller and not config.optimizer.use_precision_aware_optimizer:
        raise ValueError(f"{OPTIMIZER} {smaller[0]}: needs --use-precision-aware-optimizer")
    return values


def as_megatron(overrides: Mapping[str, Any], config_class: type) -> dict[str, Any]:
    """Return the same values with names of torch's and Megatron's own types resolved, as fields of Megatron's
    class. Raises ValueError if there are no such kernels for attention."""
    import torch
    from megatron.core.transformer.enums import AttnBackend

    hints = get_type_hints(config_class)
    values: dict[str, Any] = dict(overrides)
    for name, value in overrides.items():
        kinds = (hints[name], *get_args(hints[name]))
        if torch.dtype in kinds and value is not None:
            values[name] = getattr(torch, _DTYPES[value][0])
        elif AttnBackend in kinds:
            if value not in AttnBackend.__members__:
                raise ValueError(f"{MODEL} {name}={value}: there are {', '.join(AttnBackend.__members__)}")
            values[name] = AttnBackend[value]
    return values


@contextmanager
def blaming(flag: str, settings: Sequence[str]) -> Iterator[None]:
    """Turn what Megatron refuses within the context into a ValueError that names the given settings."""
    try:
        yield
    except (ValueError, AssertionError, ImportError) as error:
        if not settings:
            raise
        named = ", ".join(settings)
        raise ValueError(f"{flag} {named}: Megatron refuses it: {error or 'without a reason'}") from error


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that the optimizer keeps per parameter of a rank's shard."""

    device: float
    """Bytes on the GPU: the master weight if the weight is bf16, and both moments."""
    host: float
    """Bytes in main memory (--optimizer-cpu-offload): the same, and the gradient."""


@dataclass(frozen=True)
class Overrides:
    """Checked values of --model-override and --optimizer-override."""

    model: Mapping[str, Any]
    """Fields of TransformerConfig that are set. Values of torch's and Megatron's own types are text."""
    chunks: int
    """Model pieces that each rank holds; several in an interleaved pipeline."""
    micro_batch_multiple: int
    """A pass's micro-batches are a multiple of it. In an interleaved pipeline a rank takes that many through
    one of its pieces of the model before it turns to the next."""
    recomputed_modules: frozenset[str]
    """Parts of a layer that selective recomputation covers; by default Megatron's, the attention core."""
    optimizer_bytes: OptimizerBytes


def read_overrides(config: Config) -> Overrides:
    """Return the checked values of both flags. Raises as `model_overrides` and `optimizer_overrides` do."""
    model = model_overrides(config)
    chunks = model.get(CHUNKS) or 1
    group = model.get(GROUP) or config.parallel.pipeline_model_parallel_size
    selective = config.model.recompute_granularity == "selective"
    recomputed = model.get("recompute_modules") or ["core_attn"]
    return Overrides(
        model,
        chunks,
        micro_batch_multiple=1 if chunks == 1 else group,
        recomputed_modules=frozenset(recomputed if selective else ()),
        optimizer_bytes=_optimizer_bytes(config),
    )


def _check_model(config: Config) -> None:
    overrides, stages = model_overrides(config), config.parallel.pipeline_model_parallel_size
    _check_pipeline(overrides, stages)
    if not config.replays_routing:
        return
    for name in ("moe_router_fusion", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"):
        if overrides.get(name) not in (None, False, "none"):
            raise ValueError(
                f"{MODEL} {name}={overrides[name]}: its kernel or graph chooses experts itself, but "
                "--use-rollout-routing-replay and --use-routing-replay prescribe them; drop one of the "
                "two"
            )


def _check_pipeline(overrides: Mapping[str, Any], stages: int) -> None:
    chunks, group = overrides.get(CHUNKS), overrides.get(GROUP)
    if chunks is None:
        return
    if chunks < 2:
        raise ValueError(
            f"{MODEL} {CHUNKS}={chunks}: must be at least 2; leave it out for one piece per rank"
        )
    if stages < 2:
        raise ValueError(f"{MODEL} {CHUNKS}={chunks}: needs --pipeline-model-parallel-size of at least 2")
    if group is not None and group < stages:
        raise ValueError(
            f"{MODEL} {GROUP}={group}: must be at least --pipeline-model-parallel-size ({stages})"
        )
    if stages == 2 and not overrides.get("overlap_p2p_comm", True):
        raise ValueError(
            f"{MODEL} overlap_p2p_comm=false: two interleaved stages would mix up what they send each other"
        )


def check_overrides(config: Config) -> None:
    """Refuse overrides that cannot work, with a line of one ValueError for each of both flags."""
    problems = []
    for read in (_check_model, optimizer_overrides):
        try:
            read(config)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


OBJECT_KINDS = ("Callable", "ContextManager", "RecipeConfig", "InferenceCudaGraphScope")
"""Parts of the types of fields that hold a Python object."""
_SOURCES = {
    "TransformerConfig": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "OptimizerConfig": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Files and classes that declare the fields of Megatron's configurations."""


@cache
def _declared(class_name: str) -> tuple[Fields, Mapping[str, str]]:
    """Return the fields of one of `_SOURCES`, and what to do instead of setting Python objects. Reading takes
    a tenth of a second, and an update asks several times."""
    fields: dict[str, ast.expr] = {}
    for file, name in _SOURCES[class_name]:
        fields |= declared_fields("megatron.core", file, name)
    types = {name: ast.unparse(declared) for name, declared in fields.items()}
    objects = [name for name, text in types.items() if any(kind in text for kind in OBJECT_KINDS)]
    return fields, dict.fromkeys(objects, _OF_OBJECTS)


def _values(flag: str, pairs: tuple[str, ...], ours: Mapping[str, str], class_name: str) -> dict[str, Any]:
    fields, objects = _declared(class_name)
    own_flags = {name: f"use {flag_of(name)}" for name in ENTRIES if name in fields}
    instead = {**objects, **own_flags, **ours}
    values = declared_values(flag, pairs, fields, instead, library="Megatron", of=class_name)
    for name, value in values.items():
        if ast.unparse(fields[name]).count("torch.dtype") and value not in (None, *_DTYPES):
            raise ValueError(f"{flag} {name}={value}: there are {', '.join(_DTYPES)}")
    return values


def _optimizer_bytes(config: Config) -> OptimizerBytes:
    chosen, overrides = config.optimizer, optimizer_overrides(config)
    precise = not chosen.use_precision_aware_optimizer

    def size(name: str) -> int:
        return 4 if precise else _DTYPES[overrides.get(name, "fp32")][1]

    master = size("main_params_dtype") if config.model.bf16 else 0
    state = master + size("exp_avg_dtype") + size("exp_avg_sq_dtype")
    host_state = 12 if config.model.bf16 else 8  # in main memory all of it is fp32
    offloaded_fraction = (
        overrides.get("optimizer_offload_fraction", 1.0) if chosen.optimizer_cpu_offload else 0.0
    )
    return OptimizerBytes(device=state * (1 - offloaded_fraction), host=(host_state + 4) * offloaded_fraction)
