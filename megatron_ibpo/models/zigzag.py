"""The tokens of packed sequences that each rank of a context-parallel group holds.

Every sequence is padded and cut into 2 x ranks chunks of the same length. Rank r holds the chunks r and 2 x
ranks - 1 - r, one after the other, so that under causal attention all ranks have the same amount to compute.
Transformer Engine's attention over packed sequences requires this order.
"""

import torch
from torch import Tensor

from megatron_ibpo.models import packed


@packed.once_per_batch
def places(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """Return [N] int64: the place of each token when the tokens of all ranks are laid end to end.

    Args:
        cu_seqlens: boundaries of the whole sequences, each a multiple of `context_chunks(ranks)` long.
    """
    if ranks == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    position_N = packed.positions(cu_seqlens)
    start_N = torch.repeat_interleave(starts, lengths)
    chunk_length_N = torch.repeat_interleave(lengths // (2 * ranks), lengths)
    chunk_N = position_N // chunk_length_N
    is_second_N = chunk_N >= ranks
    rank_N = torch.where(is_second_N, 2 * ranks - 1 - chunk_N, chunk_N)
    own_N = start_N // ranks + is_second_N * chunk_length_N + position_N % chunk_length_N
    return rank_N * (len(position_N) // ranks) + own_N


@packed.once_per_batch
def tokens(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """Return [N] int64: the tokens of rank 0, then those of rank 1, …; the inverse of `places`."""
    places_N = places(cu_seqlens, ranks)
    return torch.empty_like(places_N).index_copy_(0, places_N, torch.arange(len(places_N)).to(places_N))


@packed.once_per_batch
def positions(cu_seqlens: Tensor, rank: int, ranks: int) -> Tensor:
    """Return [N / ranks] int64: position in its sequence of each token that `rank` holds."""
    if ranks == 1:
        return packed.positions(cu_seqlens)
    return packed.positions(cu_seqlens)[tokens(cu_seqlens, ranks).chunk(ranks)[rank]]
