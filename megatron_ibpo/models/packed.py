"""Packed sequences as rectangles, without a loop over sequences; and which of their tokens each rank holds.

Packed (thd) input is N tokens of consecutive sequences with boundaries cu_seqlens. Padding may be any token:
it comes after a sequence's own, so nothing causal sees it, and its outputs are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
CLASSES_PER_OCTAVE = 3
"""Rectangles between a length and its double. Attention over padding costs more than further calls: with 1, 3
and 4 a layer took 4.4, 3.6 and 3.7 ms for 32 sequences of 27 to 60 tokens."""


def once_per_batch(function: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """Keep each result with the boundaries that it was computed from, which must not be written to later:
    every layer of a model asks for the same, and the host would wait for the device each time."""

    @wraps(function)
    def memoized(cu_seqlens: Tensor, *arguments: P.args, **named: P.kwargs) -> T:
        results = cu_seqlens.__dict__.setdefault("results", {})
        key = (function, *arguments, *named.items())
        if key not in results:
            results[key] = function(cu_seqlens, *arguments, **named)
        result: T = results[key]
        return result

    return memoized


@dataclass(frozen=True)
class Rectangles:
    """Tokens laid out as one or more rectangles, one after another."""

    rows: list[int]
    """Rows of each rectangle."""
    widths: list[int]
    """Tokens per row of each rectangle."""
    tokens_M: Tensor
    """int64: the token at each of the M = sum(rows x widths) places."""
    places_N: Tensor
    """int64: the place of each of the N tokens."""

    def to(self, device: torch.device) -> "Rectangles":
        return replace(self, tokens_M=self.tokens_M.to(device), places_N=self.places_N.to(device))

    def split(self, x_MX: Tensor) -> list[Tensor]:
        """Return views [rows, width, ...] of each rectangle."""
        return split(x_MX, self.rows, self.widths)


def split(x_MX: Tensor, rows: list[int], widths: list[int]) -> list[Tensor]:
    """Return views [rows, width, ...] of rectangles that lie one after another."""
    sizes = [number * width for number, width in zip(rows, widths, strict=True)]
    parts = x_MX.split(sizes)
    return [
        part.unflatten(0, shape) for part, shape in zip(parts, zip(rows, widths, strict=True), strict=True)
    ]


class _Take(torch.autograd.Function):
    """x[index] along dim 0, where `index` covers every row and `inverse` gives a place of each row. The
    gradient is a gather too: places that only repeat a token get none, since their outputs are dropped."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Drop(torch.autograd.Function):
    """x[index] along dim 0, where `index` covers no row twice: its gradient is a copy into zeros."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.places = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.places, *grad.shape[1:]).index_copy_(0, index, grad), None


def take(x_NX: Tensor, rectangles: Rectangles) -> Tensor:
    """Gather tokens into places: [N, ...] -> [M, ...]."""
    return _Take.apply(x_NX, rectangles.tokens_M, rectangles.places_N)


def drop(x_MX: Tensor, rectangles: Rectangles) -> Tensor:
    """Gather places back into tokens, without padding: [M, ...] -> [N, ...]."""
    return _Drop.apply(x_MX, rectangles.places_N)


def is_real(rectangles: Rectangles) -> Tensor:
    """Return [M] bool: the places that are not padding."""
    index = rectangles.places_N
    return torch.zeros_like(rectangles.tokens_M, dtype=torch.bool).index_fill_(0, index, True)


@once_per_batch
def positions(cu_seqlens: Tensor) -> Tensor:
    """Return the position of each token in its sequence, int64 [N]."""
    lengths = cu_seqlens.diff()
    return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - torch.repeat_interleave(
        cu_seqlens[:-1].long(), lengths
    )


def length_classes(lengths_S: Tensor) -> Tensor:
    """Return int64 [S]: a number that lengths within a third of a power of two share."""
    return ((lengths_S - 1).clamp(min=1).log2() * CLASSES_PER_OCTAVE).floor().long()


@once_per_batch
def by_length(cu_seqlens: Tensor, share: int = 1) -> Rectangles:
    """Lay out one row per sequence, of which the tokens are 1 / share. A rectangle has lengths within a third
    of a power of two, so that padding adds at most some 26 % to the tokens however uneven the lengths are."""
    on_host = cu_seqlens.cpu()  # one wait for the device; there, every line below would be one
    starts, lengths = on_host[:-1].long(), on_host.diff().long()
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    classes = length_classes(lengths)
    order = classes.argsort(stable=True)
    starts, lengths, classes = starts[order] // share, lengths[order] // share, classes[order]
    kinds, rows = classes.unique_consecutive(return_counts=True)
    widths = [int(lengths[classes == kind].max()) for kind in kinds]
    laid_out = rectangles(starts, lengths, rows.tolist(), widths, int(on_host[-1]) // share)
    return laid_out.to(cu_seqlens.device)


@once_per_batch
def longest_first(cu_seqlens: Tensor, chunk: int) -> Tensor:
    """Return int64: the non-empty sequences, those with most chunks first."""
    chunks = (cu_seqlens.diff().long() + chunk - 1) // chunk
    sequences = chunks.nonzero().squeeze(1)
    return sequences[chunks[sequences].argsort(descending=True, stable=True)]


@once_per_batch
def by_chunks(cu_seqlens: Tensor, chunk: int) -> Rectangles:
    """Lay out rows of `chunk` tokens. Rectangle i holds the i-th chunk of every sequence that has one, in the
    order of `longest_first`, so a sequence keeps its row number in every rectangle."""
    on_host = cu_seqlens.cpu()
    order = longest_first(on_host, chunk)
    starts, lengths = on_host[:-1].long()[order], on_host.diff().long()[order]
    chunks = (lengths + chunk - 1) // chunk
    rows = [int((chunks > i).sum()) for i in range(int(chunks[0]))]
    row_starts = torch.cat([starts[:n] + i * chunk for i, n in enumerate(rows)])
    row_lengths = torch.cat([(lengths[:n] - i * chunk).clamp(max=chunk) for i, n in enumerate(rows)])
    laid_out = rectangles(row_starts, row_lengths, rows, [chunk] * len(rows), int(on_host[-1]))
    return laid_out.to(cu_seqlens.device)


def rectangles(
    starts: Tensor, lengths: Tensor, rows: list[int], widths: list[int], tokens: int
) -> Rectangles:
    """Return rectangles whose rows hold `lengths` tokens from `starts` on, padded to their widths."""
    width_R = torch.repeat_interleave(torch.tensor(widths), torch.tensor(rows))
    first_R = width_R.cumsum(0) - width_R
    places = int(width_R.sum())
    row_M = torch.repeat_interleave(torch.arange(len(width_R)), width_R)
    column_M = torch.arange(places) - first_R[row_M]
    tokens_M = (starts[row_M] + column_M).clamp(max=tokens - 1)
    real = (column_M < lengths[row_M]).nonzero().squeeze(1)
    places_N = torch.empty(tokens, dtype=torch.int64)
    places_N[tokens_M[real]] = real
    return Rectangles(rows, widths, tokens_M, places_N)


@once_per_batch
def places(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """Return [N] int64: the place of each token when the tokens of all context-parallel ranks lie end to end.

    Every whole sequence consists of 2 x ranks chunks of the same length. Rank r holds the chunks r and 2 x
    ranks - 1 - r, one after the other, so that all have the same amount of causal attention to compute.
    Transformer Engine's attention over packed sequences requires this order.
    """
    if ranks == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    position_N = positions(cu_seqlens)
    start_N = torch.repeat_interleave(starts, lengths)
    chunk_length_N = torch.repeat_interleave(lengths // (2 * ranks), lengths)
    chunk_N = position_N // chunk_length_N
    is_second_N = chunk_N >= ranks
    rank_N = torch.where(is_second_N, 2 * ranks - 1 - chunk_N, chunk_N)
    own_N = start_N // ranks + is_second_N * chunk_length_N + position_N % chunk_length_N
    return rank_N * (len(position_N) // ranks) + own_N


@once_per_batch
def tokens(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """Return [N] int64: the tokens of rank 0, then those of rank 1, …; the inverse of `places`."""
    places_N = places(cu_seqlens, ranks)
    return torch.empty_like(places_N).index_copy_(0, places_N, torch.arange(len(places_N)).to(places_N))


@once_per_batch
def rank_positions(cu_seqlens: Tensor, rank: int, ranks: int) -> Tensor:
    """Return [N / ranks] int64: position in its sequence of each token that `rank` holds."""
    if ranks == 1:
        return positions(cu_seqlens)
    return positions(cu_seqlens)[tokens(cu_seqlens, ranks).chunk(ranks)[rank]]
