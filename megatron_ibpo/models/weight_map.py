"""The map from Hugging Face tensors to Megatron parameters, and the division of both over ranks.

A Megatron parameter is an `Entry` under its global name. It is joined from HF tensors (`Piece`s), each cut
over the tensor-parallel ranks so that joining a rank's cuts gives that rank's shard, under any layout. In a
Megatron checkpoint it lies in `Block`s. A family gives the entries of its layers, with names relative to the
layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron_ibpo.models.families import family_module
from megatron_ibpo.models.shape import ModelShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def concatenate(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate as `torch.cat`. Torch is imported when a tensor is first moved, not when a map is made."""
    import torch

    return torch.cat(tensors, dim)


@dataclass(frozen=True)
class Cut:
    """A division of a tensor over ranks along `dim`, of each of the `sections`, or all of it, separately."""

    dim: int
    sections: tuple[int, ...] = ()
    padded: int | None = None
    """Size along `dim` that ranks divide, if larger than the tensor's (`padded_vocab_size`): the last shard
    is shorter, and the rest of its parameter is padding."""


@dataclass(frozen=True)
class Fused:
    """The place of a piece in a checkpoint with fused experts: rows of one expert of a larger tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the larger tensor."""
    expert: int
    first_row: int
    always: bool = False
    """True if no checkpoint holds the piece by itself; it is then the expert's whole part of the tensor."""


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None
    """Division over ranks; None: every rank holds all of it."""
    fused: Fused | None = None

    def within(self, prefix: str) -> Piece:
        """Return the piece with its names prefixed."""
        fused = self.fused and replace(self.fused, name=prefix + self.fused.name)
        return replace(self, name=prefix + self.name, fused=fused)

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of the tensor that holds the piece in checkpoints written here."""
        if self.fused is not None and self.fused.always:
            return self.fused.name, self.fused.shape
        return self.name, self.shape

    @property
    def ends_stored(self) -> bool:
        """True for the last piece of the tensor `stored`, in the order of a weight map."""
        return self.fused is None or not self.fused.always or self.fused.expert == self.fused.shape[0] - 1

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return (start, length) along the cut's dimension, or of rows, of the part of `rank` of `ranks`."""
        return _ranges(self.shape, self.cut, rank, ranks)

    def shard_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        return _shard_shape(self.shape, self.cut, rank, ranks)


@dataclass(frozen=True)
class Block:
    """A box of one tensor of a Megatron checkpoint."""

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Span(NamedTuple):
    """Consecutive rows of a piece's cut that are together in the shard of its parameter."""

    piece: int
    piece_row: int
    shard_row: int
    rows: int


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter."""

    name: str
    """Global name."""
    pieces: tuple[Piece, ...]
    join: Callable[[list[Tensor]], Tensor] = lambda cuts: cuts[0]
    """Cuts of the pieces -> shard of the parameter."""
    part: Callable[[Tensor], list[Tensor]] = lambda shard: [shard]
    """Inverse of `join`."""
    joined_cut: Cut | None = None
    """Division of a parameter that is joined from several pieces."""
    stored_apart: tuple[str, ...] = ()
    """Suffixes of the keys under which a Megatron checkpoint holds the cut's sections; one key if none."""
    layer: int | None = None
    expert: int | None = None
    num_experts: int = 0
    """Number of experts in the layer, of which an expert's parameter is a slice of a stored tensor."""
    even_up_to: int | None = None
    """Largest number of ranks for which an equal share of every piece makes up a shard; None: any number.
    More ranks divide the rows of the joined parameter, regardless of pieces."""
    by_rows: bool = True
    """True if `join` only moves whole rows; otherwise there is one piece, and ranks do not divide it."""
    joined_shape: tuple[int, ...] | None = None
    """Shape of the whole parameter, if `join` changes that of its piece."""
    dtype: torch.dtype | None = None
    """Data type of an untrained buffer, if another than the weights'; None: a parameter."""

    @property
    def cut(self) -> Cut | None:
        """Division of the parameter over ranks. None: every rank holds all of it."""
        return self.pieces[0].cut if len(self.pieces) == 1 else self.joined_cut

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        if self.joined_shape is not None:
            return self.joined_shape
        first = self.pieces[0].shape
        return (sum(piece.shape[0] for piece in self.pieces), *first[1:])

    def shard_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the shape of the shard of `rank` of `ranks`, without padding."""
        return _shard_shape(self.shape, self.cut, rank, ranks)

    def padding(self, rank: int, ranks: int) -> int:
        """Return the rows of padding after that rank's shard."""
        if self.cut is None or self.cut.padded is None:
            return 0
        return self.cut.padded // ranks - self.shard_shape(rank, ranks)[0]

    def ranges(self, number: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return (start, length) along the cut, or of rows, of piece `number` in the shard of `rank`."""
        if self._is_even(ranks):
            return self.pieces[number].ranges(rank, ranks)
        spans = sorted(self._rows_of_whole(rank, ranks))
        return [(span.piece_row, span.rows) for span in spans if span.piece == number]

    def assemble(self, cuts: list[Tensor], rank: int, ranks: int) -> Tensor:
        """Assemble the shard of `rank` of `ranks` from its part of each piece, ranges one after another."""
        if self._is_even(ranks):
            return self.join(cuts)
        spans = self.spans(rank, ranks)
        return concatenate([cuts[span.piece][span.piece_row :][: span.rows] for span in spans])

    def take_apart(self, shard: Tensor, rank: int, ranks: int) -> list[Tensor]:
        """Split a shard into its parts of the pieces; the inverse of `assemble`."""
        if self._is_even(ranks):
            return self.part(shard)
        spans = sorted(self.spans(rank, ranks))
        rows = [
            [shard[s.shard_row :][: s.rows] for s in spans if s.piece == n] for n in range(len(self.pieces))
        ]
        return [concatenate(parts) if parts else shard[:0] for parts in rows]

    def spans(self, rank: int = 0, ranks: int = 1) -> tuple[Span, ...]:
        """Return the row moves of `assemble`, by rows of the shard."""
        if self._is_even(ranks):
            return _spans(self.join, tuple(piece.shard_shape(rank, ranks)[0] for piece in self.pieces))
        next_rows: dict[int, int] = {}
        moved = []
        for span in sorted(self._rows_of_whole(rank, ranks)):
            moved.append(span._replace(piece_row=next_rows.get(span.piece, 0)))
            next_rows[span.piece] = moved[-1].piece_row + span.rows
        return tuple(sorted(moved, key=lambda span: span.shard_row))

    def _is_even(self, ranks: int) -> bool:
        return self.even_up_to is None or ranks <= self.even_up_to

    def _rows_of_whole(self, rank: int, ranks: int) -> list[Span]:
        """Return the shard's rows, consecutive in the whole parameter, as rows of the whole pieces."""
        first, length = _ranges(self.shape, ROWS, rank, ranks)[0]
        spans = []
        for span in self.spans():
            start, stop = max(first, span.shard_row), min(first + length, span.shard_row + span.rows)
            if start < stop:
                piece_row = span.piece_row + start - span.shard_row
                spans.append(Span(span.piece, piece_row, start - first, stop - start))
        return spans

    def within(self, megatron: str, hf: str, layer: int | None = None) -> Entry:
        """Return the entry with its names prefixed, in a layer of the model."""
        pieces = tuple(piece.within(hf) for piece in self.pieces)
        return replace(self, name=megatron + self.name, pieces=pieces, layer=layer)

    def blocks(self, rank: int = 0, ranks: int = 1) -> list[Block]:
        """Return the blocks of a Megatron checkpoint that make up the shard of `rank`, in order."""
        spans = _ranges(self.shape, self.cut, rank, ranks)
        if self.cut is None or not self.stored_apart:
            dim = self.cut.dim if self.cut else 0
            return [self._block(self.name, self.shape, dim, span) for span in spans]
        blocks, start = [], 0
        for suffix, rows, (first, length) in zip(self.stored_apart, self.cut.sections, spans, strict=True):
            shape = (rows, *self.shape[1:])
            blocks.append(self._block(f"{self.name}.{suffix}", shape, 0, (first - start, length)))
            start += rows
        return blocks

    def _block(self, key: str, shape: tuple[int, ...], dim: int, span: tuple[int, int]) -> Block:
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = span
        if self.expert is None:
            return Block(key, shape, tuple(offsets), tuple(sizes))
        grouped_key = key.removesuffix(str(self.expert)).replace(".experts.", ".experts.experts.")
        return Block(grouped_key, (self.num_experts, *shape), (self.expert, *offsets), (1, *sizes))


@lru_cache(maxsize=256)
def _spans(join: Callable[[list[Tensor]], Tensor], counts: tuple[int, ...]) -> tuple[Span, ...]:
    """Return the spans of `join`: it arranges row numbers, which show where each row goes."""
    import torch

    numbers = torch.arange(sum(counts)).view(-1, 1).split(list(counts))
    row_numbers = join(list(numbers)).flatten()
    breaks = (row_numbers.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist(), len(row_numbers)]
    firsts = [0, *itertools.accumulate(counts)]
    spans = []
    for row, end in itertools.pairwise(starts):
        source, remaining = int(row_numbers[row]), end - row
        while remaining:  # consecutive numbers may continue from one piece to the next
            piece = next(i for i in range(len(counts)) if source < firsts[i + 1])
            rows = min(remaining, firsts[piece + 1] - source)
            spans.append(Span(piece, source - firsts[piece], end - remaining, rows))
            source, remaining = source + rows, remaining - rows
    return tuple(spans)


def _ranges(shape: tuple[int, ...], cut: Cut | None, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return (start, length) of the part of `rank` of `ranks` in each section."""
    if cut is None:
        return [(0, shape[0])]
    if cut.padded is not None:
        size, share = shape[cut.dim], cut.padded // ranks
        return [(min(rank * share, size), max(0, min(share, size - rank * share)))]
    ranges, start = [], 0
    for size in cut.sections or (shape[cut.dim],):
        ranges.append((start + rank * (size // ranks), size // ranks))
        start += size
    return ranges


def _shard_shape(shape: tuple[int, ...], cut: Cut | None, rank: int, ranks: int) -> tuple[int, ...]:
    if cut is None:
        return shape
    length = sum(length for _, length in _ranges(shape, cut, rank, ranks))
    return (*shape[: cut.dim], length, *shape[cut.dim + 1 :])


ROWS, COLUMNS = Cut(0), Cut(1)
EXPERT_BIAS = "mlp.router.expert_bias"
"""Name of the only buffer of a layer: the correction of a router's scores before it chooses."""


HEAD = "lm_head.weight"
"""A checkpoint's name for the output layer's weight."""


def embedding_piece(shape: ModelShape, vocab_rows: int | None = None) -> Piece:
    """Return the embedding as a checkpoint holds it; `vocab_rows` as in `weight_map`."""
    name, size = f"{shape.hf_prefix}embed_tokens.weight", (shape.vocab_size, shape.hidden_size)
    return Piece(name, size, replace(ROWS, padded=vocab_rows))


def weight_map(shape: ModelShape, mtp_layers: int = 0, vocab_rows: int | None = None) -> dict[str, Entry]:
    """Return every Megatron parameter of the whole model, by global name, in checkpoint order.

    Args:
        mtp_layers: multi-token prediction layers, carried along or trained beside the policy.
        vocab_rows: rows of embedding and head over all ranks with padding (`padded_vocab_size`); None: the
            vocabulary's alone.
    """
    family = family_module(shape.family)
    hidden = shape.hidden_size
    embedding = embedding_piece(shape, vocab_rows)
    head = embedding if shape.tie_word_embeddings else replace(embedding, name=HEAD)
    entries = [Entry("embedding.word_embeddings.weight", (embedding,))]
    for layer in range(shape.num_layers):
        prefixes = f"decoder.layers.{layer}.", f"{shape.hf_prefix}layers.{layer}."
        entries += [entry.within(*prefixes, layer) for entry in family.layer_entries(shape, layer)]
    norm = Piece(f"{shape.hf_prefix}norm.weight", (hidden,))
    entries.append(Entry("decoder.final_layernorm.weight", (norm,)))
    entries.append(Entry("output_layer.weight", (head,)))
    for layer in range(mtp_layers):
        entries += family.mtp_entries(shape, layer)
    return {entry.name: entry for entry in entries}


_MTP = re.compile(r"^mtp\.layers\.(\d+)\.")


def mtp_layers(names: Iterable[str]) -> int:
    """Return the number of multi-token prediction layers of a checkpoint, in either format."""
    return max((int(match[1]) + 1 for name in names if (match := _MTP.match(name))), default=0)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")


def global_name(local_name: str, first_layer: int, first_expert: int) -> str:
    """Map a rank's own parameter name, in DDP or not, to its name in Megatron's checkpoints."""
    name = local_name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}", name)


def carried_entry(name: str, shape: tuple[int, ...]) -> Entry:
    """Return the entry of a carried tensor, which a Megatron checkpoint holds under its Hugging Face name."""
    return Entry(name, (Piece(name, shape),))


def is_carried(shape: ModelShape, name: str) -> bool:
    """Return whether a checkpoint's tensor is kept beside the policy and not trained."""
    return (shape.mtp_in_checkpoints and name.startswith("mtp.")) or name.startswith(shape.carried)


def is_ignored(shape: ModelShape, name: str) -> bool:
    """Return whether the model has no use for a tensor: carried, a rotary table, or a tied head's copy."""
    return (
        is_carried(shape, name)
        or name.endswith("rotary_emb.inv_freq")
        or (shape.tie_word_embeddings and name == HEAD)
    )
