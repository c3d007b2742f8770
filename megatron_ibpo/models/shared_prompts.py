"""A prompt that goes through the model once for all its responses.

The first sequences of such a micro-batch are continuations: each begins where its root ends, a prompt without
its last token, which is one of the sequences after them. That token is the first of every continuation, since
it predicts the first tokens of all responses. Layers whose tokens meet no others need know nothing of this;
attention reads the root's keys and values beside the continuation's, and a delta net starts from the root's
last state.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_ibpo.models import packed
from megatron_ibpo.models.packed import Rectangles


@dataclass(frozen=True, eq=False)
class ContinuedRows:
    """Continuations after their roots, as rectangles whose rows are those of `queries`. A root ends at the
    same place in all rows of a rectangle, so that shorter roots have padding before them."""

    queries: Rectangles
    """The continuations alone."""
    roots: list[int]
    """Places for the roots in each rectangle; those of `queries` follow."""
    tokens_M: Tensor
    """int64: the micro-batch's token at each place; at padding any."""
    leads: list[Tensor]
    """int64 [rows]: places before the root of each row."""

    def split(self, x_NX: Tensor) -> list[Tensor]:
        """Return each rectangle of these tokens, [rows, width, …]."""
        widths = [root + own for root, own in zip(self.roots, self.queries.widths, strict=True)]
        return packed.split(x_NX.index_select(0, self.tokens_M), self.queries.rows, widths)


@dataclass(frozen=True, eq=False)
class Continuations:
    """The continuations of a micro-batch of N tokens, and their roots."""

    rows: int
    """Tokens of all continuations, which are the first of the micro-batch."""
    cu_seqlens: Tensor
    """int32 [C + 1]: the continuations' boundaries, from 0 to `rows`."""
    cu_roots: Tensor
    """int32: boundaries of the other sequences, counted from the first of them: from 0 to N - `rows`."""
    root_C: Tensor
    """int64: the root of each continuation, among the other sequences."""

    @cached_property
    def root_ends_C(self) -> Tensor:
        """int64: where the root of each continuation ends, among the micro-batch's tokens."""
        return self.rows + self.cu_roots.long()[self.root_C + 1]

    @cached_property
    def positions_N(self) -> Tensor:
        """int64: the position of each token in its sequence, a root counted as part of what continues it."""
        before = self.cu_roots.diff().long()[self.root_C].repeat_interleave(self.cu_seqlens.diff())
        own = packed.positions(self.cu_seqlens) + before
        return torch.cat((own, packed.positions(self.cu_roots)))

    @cached_property
    def continued_rows(self) -> ContinuedRows:
        """The continuations, in rectangles of those whose lengths, and whose roots' lengths, are alike."""
        device, root_C = self.cu_seqlens.device, self.root_C.cpu()
        cu_seqlens, cu_roots = self.cu_seqlens.cpu().long(), self.cu_roots.cpu().long()
        lengths = cu_seqlens.diff()
        root_lengths, root_ends = cu_roots.diff()[root_C], self.root_ends_C.cpu()
        classes = torch.stack((packed.length_classes(lengths), packed.length_classes(root_lengths)), dim=1)
        kinds, kind_C, rows = classes.unique(dim=0, return_inverse=True, return_counts=True)
        widths, root_widths = (
            torch.zeros(len(kinds), dtype=torch.int64).scatter_reduce_(0, kind_C, x_C, "amax")
            for x_C in (lengths, root_lengths)
        )
        order = kind_C.argsort(stable=True)
        starts = cu_seqlens[:-1][order]
        queries = packed.rectangles(starts, lengths[order], rows.tolist(), widths.tolist(), self.rows)

        root_width_C = root_widths[kind_C][order]
        keys_C = root_width_C + widths[kind_C][order]
        row_M = torch.arange(len(keys_C)).repeat_interleave(keys_C)
        column_M = torch.arange(len(row_M)) - (keys_C.cumsum(0) - keys_C)[row_M] - root_width_C[row_M]
        tokens_M = torch.where(
            column_M < 0,
            (root_ends[order][row_M] + column_M).clamp(min=0),
            (starts[row_M] + column_M).clamp(max=self.rows - 1),
        )
        leads = (root_width_C - root_lengths[order]).to(device).split(rows.tolist())
        return ContinuedRows(queries.to(device), root_widths.tolist(), tokens_M.to(device), list(leads))


@dataclass
class PackedSequences(PackedSeqParams):
    """A micro-batch's sequences, as Megatron's layers take them."""

    continuations: Continuations | None = None
    """None: each is whole."""


def continuations(sequences: PackedSeqParams) -> Continuations | None:
    """Return which of these sequences continue others; None if none does."""
    return sequences.continuations if isinstance(sequences, PackedSequences) else None
