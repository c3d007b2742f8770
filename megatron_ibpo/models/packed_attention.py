"""Attention over packed sequences in plain torch: scaled_dot_product_attention over padded rectangles."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ibpo.models import packed
from megatron_ibpo.models.shared_prompts import Continuations


def attend_in_rectangles(
    cu_seqlens: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
) -> Tensor:
    """Compute causal attention within each sequence; H query heads share G key/value heads. [N, H, D].

    Args:
        sinks_H: each head's logit of an empty key; None: no sinks.
        window: number of tokens that each attends to, itself the last; None: all before it.
    """
    rectangles = packed.by_length(cu_seqlens)
    parts = (rectangles.split(packed.take(x, rectangles)) for x in (query_NHD, key_NGD, value_NGD))
    outputs = []
    for part in zip(*parts, strict=True):
        query, key, value = (x_BLHD.transpose(1, 2) for x_BLHD in part)
        if sinks_H is None and window is None:
            attended_BHLD = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            mask = _attention_mask(torch.arange(key.shape[2], device=key.device)[:, None], key, window)
            attended_BHLD = _attend_where(mask, query, key, value, sinks_H)
        outputs.append(attended_BHLD.transpose(1, 2).flatten(0, 1))
    return packed.drop(torch.cat(outputs), rectangles)


def attend_with_shared_prompts(
    continuations: Continuations,
    sinks_H: Tensor | None,
    window: int | None,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
) -> Tensor:
    """Compute `attend_in_rectangles` where a root is part of every sequence that continues it."""
    rows = continuations.continued_rows
    queries = rows.queries.split(packed.take(query_NHD[: continuations.rows], rows.queries))
    outputs = []
    for lead_B, *part in zip(rows.leads, queries, rows.split(key_NGD), rows.split(value_NGD), strict=True):
        query, key, value = (x_BLHD.transpose(1, 2) for x_BLHD in part)
        first = key.shape[2] - query.shape[2]  # the place of a continuation's first token
        mask = _attention_mask(first + torch.arange(query.shape[2], device=key.device)[:, None], key, window)
        if int(lead_B.max()):  # shorter roots have padding before them
            mask = mask & (torch.arange(key.shape[2], device=key.device) >= lead_B[:, None, None, None])
        attended_BHLD = _attend_where(mask, query, key, value, sinks_H)
        outputs.append(attended_BHLD.transpose(1, 2).flatten(0, 1))
    continued = packed.drop(torch.cat(outputs), rows.queries)
    others = (x_NXD[continuations.rows :] for x_NXD in (query_NHD, key_NGD, value_NGD))
    return torch.cat((continued, attend_in_rectangles(continuations.cu_roots, sinks_H, window, *others)))


def _attention_mask(position_L: Tensor, key_BGKD: Tensor, window: int | None) -> Tensor:
    """Return which of a sequence's keys the queries at position_L [..., L, 1] attend to: bool [..., L, K]."""
    keys_K = torch.arange(key_BGKD.shape[2], device=key_BGKD.device)
    mask = keys_K <= position_L  # padding of a sequence comes after all positions
    return mask if window is None else mask & (keys_K > position_L - window)


def _attend_where(
    mask: Tensor, query_BHLD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, sinks_H: Tensor | None
) -> Tensor:
    """Compute attention to the keys of the mask. [B, H, L, D]. A sink is one more key, of value zero, before
    the others: queries, keys and values get one more element, whose product is the sink."""
    if sinks_H is None:
        return F.scaled_dot_product_attention(
            query_BHLD, key_BGKD, value_BGKD, attn_mask=mask, enable_gqa=True
        )
    size = query_BHLD.shape[-1]
    sinks = sinks_H.to(query_BHLD.dtype).view(1, -1, 1, 1).expand(*query_BHLD.shape[:3], 1)
    query = torch.cat((query_BHLD * size**-0.5, sinks), dim=-1)
    of_sink = key_BGKD.new_zeros(*key_BGKD.shape[:2], 1, size + 1)
    of_sink[..., -1] = 1
    key = torch.cat((of_sink, F.pad(key_BGKD, (0, 1))), dim=2)
    value = F.pad(value_BGKD, (0, 1, 1, 0))
    mask = F.pad(mask, (1, 0), value=True)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0, enable_gqa=True)
    return attended[..., :size]


def attend_to_all_ranks(
    group: Any,
    positions_N: Tensor,
    cu_seqlens: Tensor,
    sinks_H: Tensor | None,
    window: int | None,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
) -> Tensor:
    """Compute attention of this rank's queries, at `positions_N` in their sequences, to keys and values of
    all context-parallel ranks. [N, H, D]. Other arguments as in `attend_in_rectangles`."""
    ranks = group.size()
    key_value = torch.cat((key_NGD, value_NGD), dim=1)
    by_rank = gather_from_sequence_parallel_region(key_value, tensor_parallel_output_grad=True, group=group)
    ordered = by_rank.index_select(0, packed.places(cu_seqlens, ranks))
    query_rectangles, key_rectangles = packed.by_length(cu_seqlens, ranks), packed.by_length(cu_seqlens)
    queries = query_rectangles.split(packed.take(query_NHD, query_rectangles))
    positions = query_rectangles.split(packed.take(positions_N, query_rectangles))
    outputs = []
    for query_BLHD, position_BL, part_BKGD in zip(
        queries, positions, key_rectangles.split(packed.take(ordered, key_rectangles)), strict=True
    ):
        key, value = part_BKGD.transpose(1, 2).chunk(2, dim=1)
        mask = _attention_mask(position_BL[:, None, :, None], key, window)
        attended_BHLD = _attend_where(mask, query_BLHD.transpose(1, 2), key, value, sinks_H)
        outputs.append(attended_BHLD.transpose(1, 2).flatten(0, 1))
    return packed.drop(torch.cat(outputs), query_rectangles)
