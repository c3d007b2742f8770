"""The gated delta net: Megatron's layer, by flash-linear-attention's kernels on GPUs, or in plain torch with
the same parameters and checkpoint. Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with
Delta Rule", 2024.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ibpo.models import packed, shared_prompts
from megatron_ibpo.models.delta_net import continuation, state_passing
from megatron_ibpo.models.local_modules import RMSNorm, wide

CHUNK = 32
"""Tokens per chunk of the delta rule."""


class FlashGatedDeltaNet(GatedDeltaNet):
    """Megatron's GatedDeltaNet, where only the first layer that sees a micro-batch's boundaries waits for the
    GPU to compare them with the number of tokens. Under context parallelism states are passed
    (`state_passing`), or heads exchanged by Megatron (--delta-net-cp); neither has run on GPUs."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if self.cp_size > 1 and self.config.delta_net_cp == "state":
            return _mix(self, hidden_states, packed_seq_params, _flash_conv, _flash_rule)
        return super().forward(
            hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs
        )

    def _resolve_cu_seqlens(
        self,
        cu_seqlens_padded: Tensor | None,
        cu_seqlens_actual: Tensor,
        total_seq_len: int,
        name: str,
        cp_size: int = 1,
    ) -> Tensor:
        cu_seqlens: Any = cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded
        checked_sizes = (total_seq_len, cp_size)
        if getattr(cu_seqlens, "fits", None) != checked_sizes:
            super()._resolve_cu_seqlens(cu_seqlens_padded, cu_seqlens_actual, total_seq_len, name, cp_size)
            cu_seqlens.fits = checked_sizes
        return cu_seqlens


class PackedGatedDeltaNet(GatedDeltaNet):
    """Megatron's GatedDeltaNet with a forward pass of its own."""

    def __init__(self, *args: Any, **kwargs: Any):
        with mock.patch.object(common, "HAVE_FLA", True):
            super().__init__(*args, **kwargs)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return _mix(self, hidden_states, packed_seq_params, _torch_conv, gated_delta_rule)


class GatedNorm(RMSNorm):
    """The norm of a gated delta net's output, never zero-centred: its checkpoint value is copied as it is."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__(config, hidden_size, eps)
        self.zero_centered_gamma = False


class TEGatedNorm:
    """`GatedNorm` as a TENorm."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> Any:
        from megatron.core.extensions.transformer_engine import TENorm

        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        return TENorm(config, hidden_size, eps)


def _mix(
    layer: Any,
    hidden_states: Tensor,
    packed_seq_params: PackedSeqParams | None,
    conv: Callable[[Tensor, Tensor, Tensor], Tensor],
    rule: Callable[..., Any],
) -> tuple[Tensor, Tensor | None]:
    """Run the forward pass of a GatedDeltaNet.

    Args:
        conv: ([N, F], [F, K], boundaries) → [N, F], convolution and activation.
        rule: as `gated_delta_rule`.
    """
    assert packed_seq_params is not None, "sequences must be packed"
    cu_seqlens = packed_seq_params.cu_seqlens_q
    projected, _bias = layer.in_proj(hidden_states)
    query_size, key_size, value_size, *gate_sizes = layer.in_proj_split_sections
    sizes = [query_size + key_size + value_size, *gate_sizes]
    qkv, gate, beta, alpha = projected.squeeze(1).split(sizes, dim=-1)

    def own_conv(x_NF: Tensor, boundaries: Tensor) -> Tensor:
        return conv(x_NF, layer.conv1d.weight.squeeze(1), boundaries)

    if layer.cp_size > 1:
        slices = state_passing.make_slices(cu_seqlens, layer.pg_collection.cp, layer.conv_kernel_dim - 1)
        qkv = state_passing.convolve(own_conv, qkv, slices)
        rule = partial(state_passing.delta_rule, rule, slices=slices)
    elif (shared := shared_prompts.continuations(packed_seq_params)) is not None:
        weight_FK = layer.conv1d.weight.squeeze(1)
        qkv = continuation.convolve(partial(_silu_conv, weight_FK), qkv, layer.conv_kernel_dim - 1, shared)
        rule = partial(continuation.recur, rule, continuations=shared)
    else:
        qkv = own_conv(qkv, cu_seqlens)
        rule = partial(rule, cu_seqlens=cu_seqlens)
    query, key, value = qkv.split([query_size, key_size, value_size], dim=-1)
    decay_NH = -wide(layer.A_log).exp() * F.softplus(wide(alpha) + layer.dt_bias)
    output_NHD = rule(
        query.unflatten(-1, (-1, layer.key_head_dim)),
        key.unflatten(-1, (-1, layer.key_head_dim)),
        value.unflatten(-1, (-1, layer.value_head_dim)),
        decay_NH,
        beta.sigmoid(),
    )
    normed = layer.out_norm(output_NHD)
    gated = normed * F.silu(wide(gate.unflatten(-1, (-1, layer.value_head_dim))))
    return layer.out_proj(gated.to(output_NHD.dtype).flatten(1).unsqueeze(1))


def _torch_conv(x_NF: Tensor, weight_FK: Tensor, cu_seqlens: Tensor) -> Tensor:
    return _silu_conv(weight_FK, x_NF, packed.positions(cu_seqlens))


def _silu_conv(weight_FK: Tensor, x_NF: Tensor, positions_N: Tensor) -> Tensor:
    return F.silu(causal_conv(x_NF, weight_FK, positions_N))


def _flash_conv(x_NF: Tensor, weight_FK: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Convolve by flash-linear-attention. Not run on a GPU."""
    output, _ = gdn.causal_conv1d(
        x=x_NF[None],
        weight=weight_FK,
        bias=None,
        activation="silu",
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
    )
    return output[0]


def _flash_rule(
    query_NGD: Tensor,
    key_NGD: Tensor,
    value_NHE: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    cu_seqlens: Tensor,
    first_SHDE: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` by flash-linear-attention. Not run on a GPU."""
    repeats = value_NHE.shape[1] // key_NGD.shape[1]
    query, key = (common.l2norm(x.contiguous()).repeat_interleave(repeats, 1) for x in (query_NGD, key_NGD))
    output, last_SHDE = gdn.chunk_gated_delta_rule(
        query[None],
        key[None],
        value_NHE[None],
        g=decay_NH[None],
        beta=beta_NH[None],
        initial_state=first_SHDE,
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=cu_seqlens,
    )
    return output[0], last_SHDE


class _CausalConv(torch.autograd.Function):
    """A causal convolution. It is written out because autograd's version takes four times as long on CPUs."""

    @staticmethod
    def forward(ctx, x_NF, weight_FK, positions_N):
        weights_KF = weight_FK.t().contiguous()
        output = x_NF * weights_KF[-1]
        for shift in range(1, len(weights_KF)):
            output[shift:].addcmul_(x_NF[:-shift] * _inside(positions_N, shift, x_NF), weights_KF[-1 - shift])
        ctx.save_for_backward(x_NF, weights_KF, positions_N)
        return output

    @staticmethod
    def backward(ctx, grad_NF):
        x_NF, weights_KF, positions_N = ctx.saved_tensors
        grad_x = grad_NF * weights_KF[-1]
        grad_weights = torch.empty_like(weights_KF)
        grad_weights[-1] = (grad_NF * x_NF).sum(0)
        for shift in range(1, len(weights_KF)):
            grad = grad_NF[shift:] * _inside(positions_N, shift, x_NF)
            grad_x[:-shift].addcmul_(grad, weights_KF[-1 - shift])
            grad_weights[-1 - shift] = grad.mul_(x_NF[:-shift]).sum(0)
        return grad_x, grad_weights.t(), None


def _inside(positions_N: Tensor, shift: int, like: Tensor) -> Tensor:
    """Return 1 for each token from the `shift`-th on whose sequence reaches so far back, otherwise 0."""
    return (positions_N[shift:] >= shift).to(like.dtype).unsqueeze(1)


def causal_conv(x_NF: Tensor, weight_FK: Tensor, positions_N: Tensor) -> Tensor:
    """Return the weighted sum of each channel's last K tokens, within its own sequence. [N, F]."""
    return _CausalConv.apply(x_NF, weight_FK, positions_N)


def gated_delta_rule(
    query_NGD: Tensor,
    key_NGD: Tensor,
    value_NHE: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    cu_seqlens: Tensor,
    first_SHDE: Tensor | None = None,
) -> Any:
    """Apply the gated delta rule to packed sequences. Returns [N, H, E] in the dtype of `value`.

    Each of the H value heads has a state S [D, E], zero at a sequence's start, and at every token:
    S ← exp(decay)·S;  S ← S + k ⊗ β(v − Sᵀk);  output = Sᵀq/√D, where q and k are of unit length and
    every G-th head shares them. float32 inside, or float64. With initial states `first_SHDE` the final ones
    come with the output, as a pair; for a sequence without tokens it is the initial one.
    """
    rectangles = packed.by_chunks(cu_seqlens, CHUNK)
    (groups, dim), heads = query_NGD.shape[1:], value_NHE.shape[1]

    def in_chunks(x_NHX: Tensor) -> Tensor:
        """Return [rows x heads, chunk, …]."""
        x_RLHX = packed.take(wide(x_NHX), rectangles).unflatten(0, (-1, CHUNK))
        x_RHLX = x_RLHX.transpose(1, 2)
        if len(x_NHX[0]) < heads:
            x_RHLX = x_RHLX.repeat_interleave(heads // groups, dim=1)
        return x_RHLX.flatten(0, 1)

    query_key = wide(torch.cat((query_NGD, key_NGD), dim=-1)).unflatten(-1, (2, dim))
    query_key = query_key * torch.rsqrt(query_key.square().sum(-1, keepdim=True) + 1e-6)
    query, key = in_chunks(query_key.flatten(-2)).split(dim, dim=-1)
    decay, beta, first, order = in_chunks(decay_NH), in_chunks(beta_NH), None, None
    if first_SHDE is not None:
        real_M = packed.is_real(rectangles).unflatten(0, (-1, 1, CHUNK))
        real = real_M.expand(-1, heads, -1).flatten(0, 1).to(beta.dtype)
        decay, beta = decay * real, beta * real  # padding then leaves states as they are
        order = packed.longest_first(cu_seqlens, CHUNK)
        first = wide(first_SHDE).index_select(0, order).flatten(0, 1)
    output, last = _ChunkedDeltaRule.apply(
        query * dim**-0.5,
        key,
        in_chunks(value_NHE),
        decay,
        beta,
        first,
        [rows * heads for rows in rectangles.rows],
    )
    output_RLHE = output.unflatten(0, (-1, heads)).transpose(1, 2)
    output_NHE = packed.drop(output_RLHE.flatten(0, 1), rectangles).to(value_NHE.dtype)
    if first_SHDE is None or order is None:
        return output_NHE
    return output_NHE, wide(first_SHDE).index_copy(0, order, last.unflatten(0, (-1, heads)))


class _ChunkedDeltaRule(torch.autograd.Function):
    """The delta rule in chunks of L tokens, by the WY form of the products of a chunk (paper, section 3.3),
    and its gradient. It is written out because autograd's version takes twice the time and memory.

    Inputs are [B, L, …] (B rows, each a chunk of one head): query (scaled), key [B, L, D], value [B, L, E],
    decay and beta [B, L], the states before first chunks [sizes[0], D, E] (None: zero), and `sizes`: the
    numbers of rows that are first chunks, second chunks, …; row i of a group continues row i of the group
    before. Outputs are [B, L, E], and the states after last chunks. In a chunk, with c the running sum of
    decay:

        A = tril(β kkᵀ ∘ exp(cᵢ − cⱼ), −1)        T = (I + A)⁻¹
        U = T(βv)    W = T(β exp(c) k)            V = U − W S
        P = tril(qkᵀ ∘ exp(cᵢ − cⱼ))              out = (exp(c) q) S + P V
        S ← exp(c_L) S + (exp(c_L − c) k)ᵀ V
    """

    @staticmethod
    def forward(ctx, query, key, value, decay, beta, first_state, sizes):
        ctx.set_materialize_grads(False)
        rows, length, dim = key.shape
        total = decay.cumsum(1)
        between = (total.unsqueeze(2) - total.unsqueeze(1)).exp_().tril_()
        from_start = total.exp().unsqueeze(2)
        to_end = (total[:, -1:] - total).exp_().unsqueeze(2)
        beta = beta.unsqueeze(2)
        beta_key = key * beta
        lower = torch.bmm(beta_key, key.mT).mul_(between).tril_(-1)
        eye = torch.eye(length, dtype=key.dtype, device=key.device).expand(rows, -1, -1)
        solve = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        u = torch.bmm(solve, value * beta)
        w = torch.bmm(solve, beta_key * from_start)
        within = torch.bmm(query, key.mT).mul_(between)
        query_decayed, key_decayed = query * from_start, key * to_end

        new_value, output = torch.empty_like(u), torch.empty_like(u)
        state = key.new_zeros(sizes[0], dim, value.shape[2]) if first_state is None else first_state
        states, ended_states, first = [], [], 0
        for size in sizes:
            at = slice(first, first + size)
            first += size
            ended_states.append(state[size:])  # shorter sequences
            state = state[:size]
            states.append(state)
            torch.baddbmm(u[at], w[at], state, alpha=-1, out=new_value[at])
            torch.bmm(query_decayed[at], state, out=output[at])
            output[at].baddbmm_(within[at], new_value[at])
            state = torch.baddbmm(state * from_start[at, -1:], key_decayed[at].mT, new_value[at])
        last_state = torch.cat((state, *reversed(ended_states)))
        ctx.sizes = sizes
        saved = query, key, value, beta, between, from_start, to_end, lower, solve, u, w, within, new_value
        ctx.save_for_backward(*saved, *states)
        return output, last_state

    @staticmethod
    def backward(ctx, grad_output, grad_last_state):
        saved, states = ctx.saved_tensors[:13], ctx.saved_tensors[13:]
        query, key, value, beta, between, from_start, to_end, lower, solve, u, w, within, new_value = saved
        query_decayed, key_decayed, beta_key = query * from_start, key * to_end, key * beta
        if grad_output is None:
            grad_output = torch.zeros_like(u)
        grad_new = torch.bmm(within.mT, grad_output)
        grad_query_decayed, grad_w = torch.empty_like(query), torch.empty_like(key)
        grad_key_decayed = torch.zeros_like(key)
        grad_last = key.new_zeros(len(key))
        grad_state, last = None, len(key)
        for size, state in zip(reversed(ctx.sizes), reversed(states), strict=True):
            at = slice(last - size, last)
            last -= size
            earlier = torch.bmm(query_decayed[at].mT, grad_output[at])
            if grad_last_state is not None:  # of the rows that end here
                ending = grad_last_state[0 if grad_state is None else len(grad_state) : size]
                grad_state = ending if grad_state is None else torch.cat((grad_state, ending))
            if grad_state is not None:  # of the rows that go on
                continuing = slice(last, last + len(grad_state))
                grad_new[continuing].baddbmm_(key_decayed[continuing], grad_state)
                torch.bmm(new_value[continuing], grad_state.mT, out=grad_key_decayed[continuing])
                grad_last[continuing] = (state[: len(grad_state)] * grad_state).sum((1, 2))
                earlier[: len(grad_state)].addcmul_(grad_state, from_start[continuing, -1:])
            torch.bmm(grad_output[at], state.mT, out=grad_query_decayed[at])
            torch.bmm(grad_new[at], state.mT, out=grad_w[at]).neg_()
            grad_state = earlier.baddbmm_(w[at].mT, grad_new[at], alpha=-1)

        grad_beta_value = torch.bmm(solve.mT, grad_new)
        grad_beta_key_decayed = torch.bmm(solve.mT, grad_w)
        grad_lower = torch.bmm(grad_beta_value, u.mT).baddbmm_(grad_beta_key_decayed, w.mT).neg_().tril_(-1)
        grad_within = torch.bmm(grad_output, new_value.mT)  # `between` masks the future
        grad_between = grad_lower * lower + grad_within * within
        grad_lower.mul_(between)
        grad_within.mul_(between)

        grad_query = grad_query_decayed * from_start
        grad_total = grad_between.sum(2) - grad_between.sum(1) + (grad_query * query).sum(2)
        grad_query.baddbmm_(grad_within, key)
        grad_beta_key = grad_beta_key_decayed * from_start
        grad_total += (grad_beta_key * beta_key).sum(2)
        grad_beta_key.baddbmm_(grad_lower, key)
        grad_key = grad_key_decayed.mul_(to_end)
        to_end_share = (grad_key * key).sum(2)
        grad_total -= to_end_share
        grad_total[:, -1] += to_end_share.sum(1) + grad_last * from_start[:, -1, 0]
        grad_key.baddbmm_(grad_lower.mT, beta_key).baddbmm_(grad_within.mT, query)
        grad_key.addcmul_(grad_beta_key, beta)
        grad_beta = (grad_beta_value * value).sum(2) + (grad_beta_key * key).sum(2)
        grad_decay = grad_total.flip(1).cumsum(1).flip(1)
        grad_first = grad_state if ctx.needs_input_grad[5] else None
        return grad_query, grad_key, grad_beta_value * beta, grad_decay, grad_beta, grad_first, None
