"""This rank's part of the Megatron model, from a ModelShape; and its output layer's, for the loss."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelShape, padded_vocab_size, spec
from megatron_ibpo.models.backends import BackendError, Backends, find_backends
from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.fusion import ACTIVATION
from megatron_ibpo.models.layout import exchanges_heads
from megatron_ibpo.models.lora import chosen_lora
from megatron_ibpo.models.shape import RopeScaling
from megatron_ibpo.policy import cpu
from megatron_ibpo.policy.overrides import MODEL, as_megatron, blaming, model_overrides, read_overrides


def build_model(
    shape: ModelShape,
    config: Config,
    *,
    device: Literal["cpu", "cuda", "meta"] = "cpu",
    libraries: Backends | None = None,
) -> list[Any]:
    """Build this rank's part of the model: a GPTModel, or in an interleaved pipeline several, in the order of
    their layers.

    Megatron's groups must exist (`parallel.initialize`). Weights are not initialised: `load_hf` fills every
    one of them. "meta" builds without memory, for counting. Parameters are bfloat16 under config.model.bf16,
    else float32; with --lora-rank they are frozen, and adapters are added beside them.

    chunk(input_ids [1, N], position_ids [1, N], None, packed_seq_params=PackedSeqParams("thd", …)) gives
    logits [1, N, padded_vocab_size/TP] in the last chunk of the last stage, and hidden states elsewhere. N
    must be a multiple of TP; cu_seqlens_q is int32 [sequences + 1] from 0 to N; max_seqlen_q must be set.

    Args:
        libraries: libraries that compute the layers; None: those that `find_backends` finds for the device.

    Raises:
        BackendError: a library is missing, or cannot do what the layout asks for.
        ConfigError: adapters beside modules that the model lacks.
        ValueError: Megatron refuses the configuration with --model-override.
    """
    cpu.activate()
    if libraries is None:
        allow_local = config.model.allow_local_modules
        libraries = find_backends(
            shape, on_gpu=device == "cuda", allow_local=allow_local, bf16=config.model.bf16
        )
    computes = device != "meta"
    if computes and not libraries.flash_linear_attention and exchanges_heads(shape, config.parallel):
        raise BackendError(
            "--delta-net-cp heads: only flash-linear-attention has it, and plain torch computes the delta "
            "nets here; take --delta-net-cp state"
        )
    shared = config.parallel.context_parallel_size > 1
    if computes and libraries.transformer_engine and shape.attention_sinks and shared:
        raise BackendError(
            f"--context-parallel-size {config.parallel.context_parallel_size}: Transformer Engine cannot "
            f"divide packed sequences over ranks if attention has sinks, as in {shape.family}; use 1"
        )
    backend = spec.make_backend(libraries)
    core = device_config(shape, config, device, libraries)
    numbers = range(core.virtual_pipeline_model_parallel_size or 1)
    rows = padded_vocab_size(shape, config.parallel)
    with torch.device(device), current_device(device), blaming(MODEL, config.model.model_override):
        chunks = [_chunk(shape, core, backend, number, rows) for number in numbers]
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # their group is the expert-data-parallel one, at EP=1 too
            if name.endswith(".softmax_offset"):  # Transformer Engine's are in fp32 and not marked
                parameter.data = parameter.data.to(core.params_dtype)
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    if lora := chosen_lora(config.model, shape):
        from megatron_ibpo.policy.adapters import add_adapters

        add_adapters(chunks, shape, lora, config.run.seed)
    return [chunk.to(device) for chunk in chunks]


def _chunk(shape: ModelShape, core: Any, backend: Any, number: int, vocab_size: int) -> Any:
    """Build a numbered piece of this rank's model, with the vocabulary padded to `vocab_size`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stage = parallel_state.get_pipeline_model_parallel_rank()
    is_last = number == (core.virtual_pipeline_model_parallel_size or 1) - 1
    first_layer = get_transformer_layer_offset(core, vp_stage=number, pp_rank=stage)
    layers = get_num_layers_to_build(core, vp_stage=number, pp_rank=stage)
    return GPTModel(
        config=core,
        transformer_layer_spec=spec.block_spec(shape, backend, first_layer, layers),
        vocab_size=vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=number == 0 and parallel_state.is_pipeline_first_stage(),
        post_process=is_last and parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        rotary_percent=shape.rotary_dim / shape.head_dim,
        rotary_base=shape.rope_theta,
        vp_stage=number if core.virtual_pipeline_model_parallel_size else None,
        **_rotation_arguments(shape.rope_scaling),
    )


def _rotation_arguments(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the arguments for Megatron's GPTModel."""
    if scaling is None:
        return {"position_embedding_type": "rope"}
    if scaling.rope_type == "linear":
        return {"position_embedding_type": "rope", "seq_len_interpolation_factor": scaling.factor}
    if scaling.rope_type == "llama3":
        scaled = {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
        return {"position_embedding_type": "rope", **scaled}
    return {"position_embedding_type": "yarn"}


def _rotation_attributes(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return what Megatron reads from a TransformerConfig without having fields for it."""
    if scaling is None or scaling.rope_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        # None: cosines and sines grow by 0.1 ln(factor) + 1, as in the paper and in transformers
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": scaling.truncate,
    }


def build_value_model(
    shape: ModelShape,
    config: Config,
    *,
    device: Literal["cpu", "cuda", "meta"] = "cpu",
    libraries: Backends | None = None,
) -> list[Any]:
    """Build the same model with a value head in place of the LM head: chunk(…) gives values [1, N, 1] in fp32
    on the last pipeline stage. Embeddings are not tied; `load_hf` fills all but the head."""
    untied = replace(shape, tie_word_embeddings=False)
    chunks = build_model(untied, config, device=device, libraries=libraries)
    from megatron_ibpo.policy.critic import ValueHead

    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(
                shape.hidden_size,
                chunk.config.params_dtype,
                torch.device(device),
                chunk.config.sequence_parallel,
            )
    return chunks


def current_device(device: str) -> AbstractContextManager[Any]:
    """Set the current device, which Megatron asks CUDA for; a model without memory needs its own."""
    if device != "meta":
        return nullcontext()
    return mock.patch.object(torch.cuda, "current_device", return_value=torch.device("meta"))


def transformer_config(
    shape: ModelShape, config: Config, *, use_te: bool = False, fused: frozenset[str] = frozenset()
) -> Any:
    """Return Megatron's configuration: dimensions, layout, precision, recomputation, and parts of local
    modules that are `fused`. Raises ValueError if Megatron refuses the result of --model-override."""
    fields = _own_fields(shape, config, use_te=use_te)
    fields["bias_activation_fusion"] |= ACTIVATION in fused
    core: Any = _megatron_config(fields, config)
    for name, value in _rotation_attributes(shape.rope_scaling).items():
        setattr(core, name, value)
    core.context_parallel_size = config.parallel.context_parallel_size
    core.delta_net_cp = config.parallel.delta_net_cp
    core.fused = fused
    return core


def device_config(
    shape: ModelShape, config: Config, device: Literal["cpu", "cuda", "meta"], libraries: Backends
) -> Any:
    """Return the result of `transformer_config` for a model that these libraries build on a device."""
    fused = libraries.fused
    if fused and device == "cuda":  # those that work on all GPUs
        from megatron_ibpo.models.fusion_check import working_parts

        shards = config.parallel.tensor_model_parallel_size, config.parallel.expert_tensor_parallel_size
        fused = working_parts(fused, shape, _dtype(config), device, shards)
    core = transformer_config(shape, config, use_te=libraries.transformer_engine, fused=fused)
    core.use_cpu_initialization = device == "cpu"
    core.init_model_with_meta_device = device == "meta"
    core.moe_permute_fusion &= device == "cuda"  # creates tensors on the GPU
    return core


def check_model(shape: ModelShape, config: Config) -> None:
    """Have Megatron check the configuration of a GPU run, on a machine that may lack its libraries. Raises
    ValueError if it refuses the result of --model-override."""
    cpu.activate()  # before Megatron, which would import the compiler: 3 s
    fields = _own_fields(shape, config, use_te=True)
    fields |= {"apply_rope_fusion": False, "moe_permute_fusion": False}  # Megatron looks for their kernels
    _megatron_config(fields, config)


def _megatron_config(fields: dict[str, Any], config: Config) -> Any:
    """Return Megatron's configuration with --model-override over these fields."""
    from megatron.core.transformer import TransformerConfig

    with blaming(MODEL, config.model.model_override):
        return TransformerConfig(**{**fields, **as_megatron(model_overrides(config), TransformerConfig)})


def _dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.model.bf16 else torch.float32


def _own_fields(shape: ModelShape, config: Config, *, use_te: bool) -> dict[str, Any]:
    parallel, model = config.parallel, config.model
    dtype, chunks, scaling = _dtype(config), read_overrides(config).chunks, shape.rope_scaling
    recompute = model.recompute_granularity if model.recompute_granularity != "none" else None
    fields: dict[str, Any] = {
        # dimensions
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size or shape.expert_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "layernorm_zero_centered_gamma": shape.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": shape.query_key_norms,
        "add_qkv_bias": shape.qkv_bias,
        "attention_output_gate": shape.attention_output_gate,
        "softmax_type": "learnable" if shape.attention_sinks else "vanilla",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # layout
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
        # Megatron requires delta-net heads to divide, which is unnecessary when states are passed
        "context_parallel_size": parallel.context_parallel_size if parallel.delta_net_cp == "heads" else 1,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        "variable_seq_lengths": True,  # between pipeline stages
        "moe_token_dispatcher_type": "alltoall",  # the only one that takes them
        # as in Megatron-LM: in batches, two interleaved stages would mix up what they send each other
        "overlap_p2p_comm": chunks > 1,
        "batch_p2p_comm": chunks == 1,
        # precision
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bool(model.bf16),
        # memory
        "recompute_granularity": recompute,
        "recompute_method": model.recompute_method if recompute == "full" else None,
        "recompute_num_layers": model.recompute_num_layers if recompute == "full" else None,
        # implementation
        "transformer_impl": "transformer_engine" if use_te else "local",
        "perform_initialization": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": use_te,
        # Transformer Engine's rotation cannot scale cosines and sines
        "apply_rope_fusion": use_te and (scaling is None or scaling.rope_type != "yarn"),
    }
    if shape.is_moe:
        fields |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_hidden_size,
            # softmax over the chosen experts equals softmax over all, then normalised
            "moe_router_pre_softmax": not shape.normalize_expert_weights,
            "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
            "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": use_te,
            "moe_permute_fusion": use_te,
        }
    if window := next(filter(None, shape.windows), None):
        fields |= {
            "window_size": (window - 1, 0),  # the token itself is left out
            "window_attn_skip_freq": [int(window is not None) for window in shape.windows],
        }
    if shape.shared_expert_hidden_size:
        fields |= {
            "moe_shared_expert_intermediate_size": shape.shared_expert_hidden_size,
            "moe_shared_expert_gate": shape.shared_expert_gate,
        }
    family = family_module(shape.family)
    return fields | (family.megatron_fields(shape) if hasattr(family, "megatron_fields") else {})


def whole_hidden_states(*, hidden_states: Tensor, output_layer: Any, **_: Any) -> Tensor:
    """Act as GPTModel's `output_processor`: return [1, N, H], every row on every tensor-parallel rank. As in
    the output layer, the backward pass sums the gradients of the ranks' columns."""
    if output_layer.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden_states).transpose(0, 1)
    return copy_to_tensor_model_parallel_region(hidden_states).transpose(0, 1)


def head_weight(model: Any) -> Tensor:
    """Return [V / TP, H], this rank's rows of the output layer of a GPTModel's last stage, tied or not."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def own_vocabulary(width: int, vocab_size: int) -> dict[str, Any]:
    """Return this rank's columns of the vocabulary, `width` with padding, as arguments for the loss."""
    start = parallel_state.get_tensor_model_parallel_rank() * width
    return {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "vocab_range": (start, min(start + width, vocab_size)),
    }
