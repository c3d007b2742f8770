"""The gated delta net in plain torch, over packed sequences.

Megatron's layer needs flash-linear-attention's CUDA kernels and refuses to start without them; this one
keeps its parameters and checkpoint and computes the same. Gated DeltaNet: Yang, Kautz and Hatamizadeh,
"Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
from torch import Tensor

from megatron_ibpo.policy import packed

__all__ = ["PackedGatedDeltaNet", "causal_conv", "gated_delta_rule"]

CHUNK = 64
"""Tokens per chunk of the delta rule."""


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
        assert packed_seq_params is not None, "sequences must be packed"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        projected, _bias = self.in_proj(hidden_states)
        qkv, gate, beta, alpha = projected.squeeze(1).split(self.feat_dim_split, dim=-1)

        qkv = F.silu(causal_conv(qkv, self.conv1d.weight.squeeze(1), packed.positions(cu_seqlens)))
        query, key, value = qkv.split(
            [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp], dim=-1
        )
        decay_NH = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        output_NHD = self.gated_delta_rule(
            query.unflatten(-1, (-1, self.key_head_dim)),
            key.unflatten(-1, (-1, self.key_head_dim)),
            value.unflatten(-1, (-1, self.value_head_dim)),
            decay_NH,
            beta.sigmoid(),
            cu_seqlens,
        )
        normed = self.out_norm(output_NHD)
        gated = normed * F.silu(gate.unflatten(-1, (-1, self.value_head_dim)).float())
        return self.out_proj(gated.to(output_NHD.dtype).flatten(1).unsqueeze(1))


def causal_conv(x_NC: Tensor, weight_CK: Tensor, positions_N: Tensor) -> Tensor:
    """Each channel's last K tokens, weighted, within its own sequence. [N, C]."""
    kernel = weight_CK.shape[1]
    output = x_NC * weight_CK[:, -1]
    for back in range(1, kernel):
        shifted = F.pad(x_NC, (0, 0, back, 0))[: len(x_NC)]
        weight = weight_CK[:, -1 - back]
        output = output + shifted * ((positions_N >= back).unsqueeze(1) * weight)
    return output


def gated_delta_rule(
    query_NGD: Tensor,
    key_NGD: Tensor,
    value_NHE: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """The gated delta rule over packed sequences, in chunks. [N, H, E] in the dtype of `value`.

    Each of the H value heads has a state S [D, E], zero at a sequence's start, and at every token:
    S ← exp(decay)·S;  S ← S + k ⊗ β(v − kᵀS);  output = qᵀS/√D, with unit-length q and k (H a multiple of
    their G heads). Chunks are computed at once by the WY form of the products (paper, section 3.3);
    float32 inside.
    """
    rectangles = packed.by_chunks(cu_seqlens, CHUNK)
    groups, dim = query_NGD.shape[1:]
    heads, value_dim = value_NHE.shape[1:]
    query_NGD, key_NGD = _unit_length(query_NGD.float()), _unit_length(key_NGD.float())
    together = torch.cat(
        (
            query_NGD.flatten(1) * dim**-0.5,
            key_NGD.flatten(1),
            value_NHE.float().flatten(1),
            decay_NH.float(),
            beta_NH.float(),
        ),
        dim=1,
    )
    placed = packed.take(together, rectangles).unflatten(0, (-1, CHUNK))
    query, key, value, decay, beta = placed.split(
        [groups * dim, groups * dim, heads * value_dim, heads, heads], dim=-1
    )

    def by_head(x_RLC: Tensor, count: int) -> Tensor:
        x_RHLC = x_RLC.unflatten(-1, (count, -1)).transpose(1, 2)
        return x_RHLC.repeat_interleave(heads // count, dim=1) if heads > count else x_RHLC

    query_RHLD, key_RHLD = by_head(query, groups), by_head(key, groups)
    value_RHLE, beta_RHL1 = by_head(value, heads), by_head(beta, heads)
    decay_RHL1 = by_head(decay, heads).cumsum(2)  # since the chunk's start

    # decay between two tokens of a chunk, later (row) from earlier (column); 0 for the future
    between_RHLL = (decay_RHL1 - decay_RHL1.mT).tril().exp().tril()
    from_start_RHL1 = decay_RHL1.exp()
    to_end_RHL1 = (decay_RHL1[:, :, -1:] - decay_RHL1).exp()
    beta_key = key_RHLD * beta_RHL1
    lower = ((beta_key @ key_RHLD.mT) * between_RHLL).tril(-1)
    solved = torch.linalg.solve_triangular(
        lower,
        torch.cat((value_RHLE * beta_RHL1, beta_key * from_start_RHL1), dim=-1),
        upper=False,
        unitriangular=True,
    )
    within = (query_RHLD @ key_RHLD.mT) * between_RHLL
    query_from_start = query_RHLD * from_start_RHL1
    key_to_end = key_RHLD * to_end_RHL1
    chunk_decay = from_start_RHL1[:, :, -1:]

    outputs = []
    state_RHDE: Tensor | None = None
    sizes = rectangles.rows
    for solved_c, within_c, query_c, key_c, decay_c in zip(
        solved.split(sizes),
        within.split(sizes),
        query_from_start.split(sizes),
        key_to_end.split(sizes),
        chunk_decay.split(sizes),
        strict=True,
    ):
        new_value, old_key = solved_c.split([value_dim, dim], dim=-1)
        if state_RHDE is None:
            outputs.append(within_c @ new_value)
            state_RHDE = key_c.mT @ new_value
        else:
            state_RHDE = state_RHDE[: len(solved_c)]  # shorter sequences have ended
            new_value = new_value - old_key @ state_RHDE
            outputs.append(query_c @ state_RHDE + within_c @ new_value)
            state_RHDE = state_RHDE * decay_c + key_c.mT @ new_value
    output_RLHE = torch.cat(outputs).transpose(1, 2)
    return packed.drop(output_RLHE.flatten(0, 1), rectangles).to(value_NHE.dtype)


def _unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
