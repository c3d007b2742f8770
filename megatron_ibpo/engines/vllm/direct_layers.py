"""Layers of vLLM's models on CPUs without what only hooks, compiled models, several workers, or quantized
weights need. For the few rows of a decode step of a small model that took longer than the products."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm import _custom_ops as operators
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from megatron_ibpo.engines.vllm.fixes import replaces, written_for


@written_for("0.32")
def call_directly() -> None:
    """Change layers, and models that are loaded from now on. The results keep their bits."""
    replaces(ColumnParallelLinear, "forward")(_multiply)
    replaces(RowParallelLinear, "forward")(_multiply)
    replaces(Attention, "forward")(_attend)
    replaces(SiluAndMul, "forward_cpu")(_gate)
    replaces(CPUModelRunner, "load_model")(_load)


def _load(load_model: Any, runner: Any, *arguments: Any, **options: Any) -> None:
    """Load a model, and have its modules called as functions: torch looks for hooks of each, and there are
    none."""
    load_model(runner, *arguments, **options)
    for kind in {type(module) for module in runner.model.modules()}:
        if kind.__module__.startswith("vllm.") and kind.__call__ is nn.Module.__call__:
            is_dispatched = issubclass(kind, CustomOp) and kind.forward is CustomOp.forward
            kind.__call__ = _call_chosen_method if is_dispatched else kind.forward


def _call_chosen_method(module: Any, *arguments: Any, **options: Any) -> Any:
    return module._forward_method(*arguments, **options)


def _multiply(forward: Any, layer: Any, x: Tensor) -> Any:
    is_whole = layer.tp_size == 1 and not layer.skip_bias_add and layer.return_bias
    if not is_whole or type(layer.quant_method) is not UnquantizedLinearMethod:
        return forward(layer, x)
    return layer.cpu_linear(x, layer.weight, layer.bias), None


def _gate(_: Any, __: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def _attend(
    forward: Any,
    layer: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """Attend with keys and values that are cached first."""
    context, attention = get_forward_context(), layer.impl
    if (
        arguments or options or key is None or value is None
        or not isinstance(context.attn_metadata, dict)
        or type(attention) is not CPUAttentionBackendImpl
        or attention.attn_type != AttentionType.DECODER
        or attention.sinks is not None
        or layer.kv_sharing_target_layer_name is not None
        or layer.query_quant is not None
        or layer.head_size_v != layer.head_size
    ):  # fmt: skip
        return forward(layer, query, key, value, *arguments, **options)
    metadata: Any = context.attn_metadata[layer.layer_name]
    num_rows, num_tokens, kv_heads = len(query), metadata.num_actual_tokens, layer.num_kv_heads
    output = query.new_empty(num_rows, layer.num_heads, layer.head_size_v)
    keys, values = layer.kv_cache.view(len(layer.kv_cache), kv_heads, -1, layer.head_size).chunk(2, 2)
    operators.cpu_attn_reshape_and_cache(
        key.view(num_rows, kv_heads, layer.head_size),
        value.view(num_rows, kv_heads, layer.head_size_v),
        keys,
        values,
        context.slot_mapping[layer.layer_name],
        layer.isa,
        layer._k_scale_float,
        layer._v_scale_float,
        attention.kv_cache_dtype,
    )
    torch.ops._C.cpu_attention_with_kv_cache(
        query.view(num_rows, layer.num_heads, layer.head_size)[:num_tokens],
        keys,
        values,
        output[:num_tokens],
        metadata.query_start_loc,
        metadata.seq_lens,
        attention.scale,
        metadata.causal,
        attention.alibi_slopes,
        attention.sliding_window,
        metadata.block_table,
        attention.logits_soft_cap,
        metadata.scheduler_metadata,
        None,
        metadata.dynamic_causal,
        layer._k_scale_float,
        layer._v_scale_float,
        attention.kv_cache_dtype,
    )
    return output.view(num_rows, -1)
