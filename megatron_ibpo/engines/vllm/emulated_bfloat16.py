"""vLLM on processors that have no instructions for bfloat16, such as those with AVX2 only. There vLLM 0.32
multiplies bfloat16 matrices ten times slower than float32 ones, convolves every channel of every prompt by a
call of its own, and tokens in half a millisecond, and reads a prompt's delta rule by chunks of emulated
products. Here these are computed in float32, from the same bfloat16 weights, and rounded to bfloat16 at the
end."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm import _custom_ops as operators
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from megatron_ibpo.engines.vllm.fixes import replaces, written_for

SMALL_WEIGHT = 2**17
"""Elements of a weight up to which torch multiplies 32 rows or fewer as fast as oneDNN does. At 576 x 960 it
takes 1.25 times as long, and at 576 x 49,152 twice."""
Product = Callable[[Tensor, Tensor | None], Tensor]


def is_bfloat16_emulated() -> bool:
    """Return whether this processor has no instructions that multiply bfloat16."""
    return not bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@written_for("0.32")
def compute_in_float32() -> None:
    """Make layers that are built from now on, and prompts, use float32."""
    replaces(linear_layers, "dispatch_cpu_unquantized_gemm")(_choose_product)
    replaces(gdn_attention, "causal_conv1d_torch")(_convolve)
    replaces(gdn_attention, "causal_conv1d_update_cpu")(_convolve_tokens)
    replaces(operators, "fused_gdn_gating_cpu")(_leave_gating)
    replaces(operators, "chunk_gated_delta_rule_cpu")(_read_prompts)


def _choose_product(choose: Any, layer: Any, remove_weight: bool) -> None:
    """Multiply in float32: by torch where the weight is small, for which it takes less time, and by oneDNN
    from packed weights where it is large, as vLLM does with weights in float32."""
    weight_NK, is_small = layer.weight, layer.weight.numel() <= SMALL_WEIGHT
    if weight_NK.is_meta or weight_NK.ndim != 2 or not weight_NK.is_floating_point():
        choose(layer, remove_weight)
    elif weight_NK.dtype != torch.float32:
        layer.cpu_linear = partial(_multiply_rounded, _product(weight_NK.data.float(), is_small))
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight_NK.new_empty(0), requires_grad=False)
    elif is_small:
        layer.cpu_linear = partial(_multiply, _product(weight_NK.data, is_small))
    else:
        choose(layer, remove_weight)


def _product(weight_NK: Tensor, is_small: bool) -> Product:
    """Return the function of rows and a bias that multiplies by this weight in float32."""
    if is_small:
        return lambda x, bias: functional.linear(x, weight_NK, bias)
    packed = operators.create_onednn_mm(weight_NK.t())
    return lambda x, bias: operators.onednn_mm(packed, x, bias)


def _multiply(product: Product, x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, bias)


def _multiply_rounded(product: Product, x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
    return product(x.float(), None if bias is None else bias.float()).to(x.dtype)


def _convolve(
    _: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None,
) -> Tensor:
    """Convolve the tokens of all prompts [C, T], each behind the state of its slot, or behind zeros."""
    history = weight.shape[1] - 1
    lengths_S = query_start_loc.diff()
    prompts_T = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    places_T = torch.arange(x.shape[1]) + history * (prompts_T + 1)
    # a prompt's rows: its state, and then its tokens
    rows = x.new_zeros(x.shape[1] + history * len(lengths_S), x.shape[0], dtype=torch.float32)
    ends_S = query_start_loc[1:] + history * torch.arange(1, len(lengths_S) + 1)
    starts_S = ends_S - lengths_S - history
    rows[places_T] = x.T.float()
    continued = has_initial_state.nonzero()[:, 0]
    for step in range(history):
        states = conv_states[cache_indices[continued].long(), :, step]
        rows[starts_S[continued] + step] = states.float()
    num_windows, taps = len(rows) - history, weight.T.float().contiguous()
    output = rows[:num_windows] * taps[0]
    for tap in range(1, history + 1):
        output.addcmul_(rows[tap : tap + num_windows], taps[tap])
    output = output[places_T - history]
    if bias is not None:
        output += bias.float()
    for step in range(history):
        conv_states[cache_indices.long(), :, step] = rows[ends_S - history + step].to(conv_states.dtype)
    return (functional.silu(output, inplace=True) if activation else output).to(x.dtype).T


def _convolve_tokens(
    _: Any,
    *,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one token of each sequence [S, C] behind the state of its slot."""
    states, slots_S = conv_state.transpose(1, 2), conv_state_indices.long()
    windows = torch.cat([states.index_select(0, slots_S), x.unsqueeze(1)], 1)
    output = (windows.float() * weight.T.float().contiguous()).sum(1)
    states.index_copy_(0, slots_S, windows[:, 1:])
    output = output if bias is None else output + bias.float()
    return (functional.silu(output) if activation else output).to(x.dtype)


def _leave_gating(
    _: Any, *, A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what decays and betas come from: the kernel of `_read_prompts` makes them itself."""
    return {"A_log": A_log, "a": a.contiguous(), "dt_bias": dt_bias}, b.contiguous()


def _read_prompts(
    _: Any,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: dict[str, Any],
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Read prompts token by token, with the kernel that scores drafts. It goes over several tokens of a
    sequence, and keeps the state after each in a slot of its own; here a sequence has one slot for all."""
    num_sequences, longest = len(initial_state_indices), int(cu_seqlens.diff().max())
    # the kernel asks a single row too for strides of contiguous rows
    slots = torch.empty(num_sequences, longest, dtype=torch.int32).copy_(initial_state_indices[:, None])
    output = operators.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        **g,
        b=beta,
        q=query.squeeze(0),
        k=key.squeeze(0),
        v=value.squeeze(0),
        initial_state_source=initial_state,
        spec_state_indices=slots,
        num_accepted_tokens=torch.ones(num_sequences, dtype=torch.int32),
        cu_seqlens=cu_seqlens.to(torch.int32).contiguous(),
        use_qk_l2norm_in_kernel=True,
    )
    return output.unsqueeze(0), None
