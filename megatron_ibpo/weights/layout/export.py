"""Megatron parameters under Hugging Face names: the parts of each tensor and the ranks that hold them.

Names are those of Hugging Face checkpoints with one tensor per expert, which both transformers and vLLM's
`load_weights` take. If a family's checkpoints hold all experts of a layer in one tensor only, its name is
used, and each rank has the part of its experts.

Whole tensors are gathered on one trainer rank or on all, one bucket ahead. On GPUs all of it is computed on
one stream. It has run on one GPU only, where nothing comes from others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.weight_map import Entry, Piece, weight_map
from megatron_ibpo.weights.layout.holdings import (
    my_holding,
    named_globally,
    shard_holders,
    weights_by_global_name,
)
from megatron_ibpo.weights.layout.regions import (
    Box,
    LocalBoxes,
    Region,
    TensorMeta,
    WeightSource,
    assemble,
    choose_senders,
    full_box,
    messages,
    need_all,
    pack,
    parts_by_tensor,
    plan_buckets,
    receive_buffer,
)


@dataclass(frozen=True)
class _Task:
    """An entry and the ranks that hold its shards."""

    entry: Entry
    holders: tuple[tuple[int, ...], ...]
    """Ranks that hold each shard, in order."""

    def boxes(self, number: int, shard: int) -> list[Box]:
        """Return the boxes of piece `number` in shard number `shard` of the entry, in the order of its rows
        or columns."""
        piece = self.entry.pieces[number]
        bounds, dim = full_box(piece.shape), piece.cut.dim if piece.cut else 0
        return [
            _in_stored(piece, (*bounds[:dim], (start, start + length), *bounds[dim + 1 :]))
            for start, length in self.entry.ranges(number, shard, len(self.holders))
        ]

    def regions(self, number: int) -> tuple[Region, ...]:
        """Return the regions of piece `number` with the ranks that hold them."""
        piece = self.entry.pieces[number]
        if piece.cut is None:
            everyone = tuple(sorted(rank for ranks in self.holders for rank in ranks))
            return (Region(_in_stored(piece, full_box(piece.shape)), everyone),)
        return tuple(
            Region(box, ranks)
            for shard, ranks in enumerate(self.holders)
            for box in self.boxes(number, shard)
        )

    def shard_of(self, rank: int) -> int | None:
        """Return the shard that `rank` holds."""
        return next((shard for shard, ranks in enumerate(self.holders) if rank in ranks), None)


class HFExport:
    """The model's weights as a `WeightSource`, and gathered whole on rank 0.

    Iterating is collective: every trainer rank must iterate to the end. It yields (name, tensor) in the order
    of `metadata()`. The tensor is whole on global rank 0, on the parameters' device and in their dtype or its
    entry's own; it is None elsewhere. A yielded tensor may share memory with the model.
    """

    def __init__(
        self,
        chunks: list[Any],
        shape: ModelShape,
        *,
        mtp: Any = None,
        values: Mapping[str, Callable[[], Tensor]] | None = None,
        entries: Sequence[Entry] | None = None,
        bucket_bytes: int = 512 * 1024**2,
    ):
        """Plan the export. Collective. `chunks` come from `build_model`, wrapped by DDP or not.

        Args:
            mtp: from `build_mtp`: its weights follow the policy's; None: without them.
            values: functions by global name whose result replaces a parameter's content on this rank.
            entries: entries to offer, in this order; None: all weights of the model.
            bucket_bytes: bytes of tensors that rank 0 gathers at once when it iterates; at least one tensor.
                Two such buckets exist: one in use, and the next one on its way.
        """
        holding = my_holding(shape, chunks)
        self._rank = dist.get_rank()
        self._weights = dict(weights_by_global_name(chunks, holding))
        if mtp is not None:
            self._weights |= named_globally(mtp, 0, holding)
        self._values = values or {}
        first = next(iter(self._weights.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        holdings: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(holdings, holding)
        layers = int(mtp is not None)
        offered = _entries(shape, layers, holding.vocab_rows) if entries is None else entries
        placed = zip(offered, shard_holders(offered, holdings), strict=True)
        self._tasks = [_Task(*task) for task in placed]
        self._metadata = _metadata(offered, self.dtype)
        self._regions = _regions(self._tasks)
        self._gather = Gather(self, to=0, bucket_bytes=bucket_bytes, device=self.device)

    def metadata(self) -> list[TensorMeta]:
        return self._metadata

    def regions(self) -> list[tuple[Region, ...]]:
        return self._regions

    def local(self) -> Iterator[dict[Box, Tensor]]:
        stored_boxes: dict[Box, Tensor] = {}
        for task in self._tasks:
            for piece, boxes in zip(task.entry.pieces, self._local_boxes(task), strict=True):
                stored_boxes |= boxes
                if piece.ends_stored:
                    yield stored_boxes
                    stored_boxes = {}

    def _local_boxes(self, task: _Task) -> list[dict[Box, Tensor]]:
        """Return, for each piece, this rank's part of the tensor that it is stored in."""
        shard = task.shard_of(self._rank)
        if shard is None:
            return [{} for _ in task.entry.pieces]
        name = task.entry.name
        read = self._values.get(name)
        weight = self._weights[name].detach() if read is None else read()
        padding = task.entry.padding(shard, len(task.holders))
        parts = task.entry.take_apart(weight[: len(weight) - padding], shard, len(task.holders))
        return [
            _by_box(task.entry.pieces[number], part, task.boxes(number, shard))
            for number, part in enumerate(parts)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        return iter(self._gather)


def metadata_of(shape: ModelShape, dtype: torch.dtype) -> list[TensorMeta]:
    """Return the tensors of a model in checkpoint order, as a trainer of `dtype` offers them."""
    return _metadata(_entries(shape, 0), dtype)


def _metadata(entries: Sequence[Entry], dtype: torch.dtype) -> list[TensorMeta]:
    return [
        TensorMeta(name, entry.dtype or dtype, size)
        for entry in entries
        for name, size in (piece.stored for piece in entry.pieces if piece.ends_stored)
    ]


def _regions(tasks: list[_Task]) -> list[tuple[Region, ...]]:
    regions, parts = [], list[Region]()
    for task in tasks:
        for number, piece in enumerate(task.entry.pieces):
            parts += task.regions(number)
            if piece.ends_stored:
                regions.append(tuple(parts))
                parts = []
    return regions


def _in_stored(piece: Piece, box: Box) -> Box:
    """Return a box of a piece as a box of the tensor that it is stored in."""
    if piece.fused is None or not piece.fused.always:
        return box
    return ((piece.fused.expert, piece.fused.expert + 1), *box)


def _by_box(piece: Piece, part: Tensor, boxes: list[Box]) -> dict[Box, Tensor]:
    """Return a shard of a piece, cut at the borders of its boxes."""
    dim = piece.cut.dim if piece.cut else 0
    if not boxes:
        return {}
    if piece.fused is not None and piece.fused.always:
        return {boxes[0]: part[None]}
    sizes = [box[dim][1] - box[dim][0] for box in boxes]
    return dict(zip(boxes, part.split(sizes, dim), strict=True))


def _entries(shape: ModelShape, mtp_layers: int, vocab_rows: int | None = None) -> list[Entry]:
    """Return all entries in checkpoint order; every HF tensor once."""
    entries = []
    names: set[str] = set()
    for entry in weight_map(shape, mtp_layers, vocab_rows).values():
        if entry.pieces[0].name not in names:  # the head of tied embeddings
            entries.append(entry)
        names.update(piece.name for piece in entry.pieces)
    return entries


@dataclass
class _Arriving:
    """A bucket on its way: this rank's own part of it, and the messages from other ranks."""

    place: int
    """Index of the bucket among all."""
    bucket: range
    local: dict[int, LocalBoxes]
    flats: dict[int, Tensor] = field(default_factory=dict)
    """Flat tensors by sender; the sender itself keeps those that must stay until they have been sent."""
    works: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()  # a work keeps its buffer


class Gather:
    """An iterator over whole tensors, collective over the default process group: every rank must iterate to
    the end.

    It yields (name, tensor) in the source's order: the whole tensor on ranks that get it, None elsewhere.
    While one bucket is in use the next one travels. A tensor may share memory with the model.
    """

    def __init__(
        self, source: WeightSource, *, to: int | None, bucket_bytes: int, device: torch.device | str
    ) -> None:
        """Plan the gathering, once.

        Args:
            to: the rank that gets the tensors; None for all ranks.
            bucket_bytes: size of a bucket; two exist, and a larger tensor is a bucket of its own.
        """
        self._source = source
        self._to = to
        self._device = device
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._metas = source.metadata()
        self._needs = need_all(self._metas)
        senders = choose_senders(self._metas, source.regions(), prefer=to)
        self._buckets = plan_buckets(self._metas, bucket_bytes)
        self._messages = [messages(bucket, senders, self._needs) for bucket in self._buckets]

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        local = self._source.local()
        coming = (self._post(place, local) for place in range(len(self._buckets)))
        arriving = next(coming, None)
        while arriving is not None:
            following = next(coming, None)
            arriving.wait()
            yield from self._tensors(arriving)
            arriving = following

    def _post(self, place: int, local: Iterator[LocalBoxes]) -> _Arriving:
        """Start sending and receiving a bucket."""
        bucket = self._buckets[place]
        arriving = _Arriving(place, bucket, dict(zip(bucket, islice(local, len(bucket)), strict=True)))
        operations = []
        for sender, message in self._messages[place].items():
            mine = sender == self._rank
            if mine and self._to == self._rank:
                continue  # this rank holds it already
            if not mine and self._to not in (self._rank, None):
                continue
            flat = pack(message, arriving.local) if mine else receive_buffer(message, self._device)
            arriving.flats[sender] = flat
            if self._to is None:
                arriving.works.append(dist.broadcast(flat, src=sender, async_op=True))
            elif mine:
                operations.append(dist.P2POp(dist.isend, flat, self._to, tag=place))
            else:
                operations.append(dist.P2POp(dist.irecv, flat, sender, tag=place))
        if operations:
            arriving.works += dist.batch_isend_irecv(operations)
        if self._to not in (self._rank, None):
            arriving.local.clear()
        return arriving

    def _tensors(self, arriving: _Arriving) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the tensors of a bucket that has arrived."""
        if self._to not in (self._rank, None):
            yield from ((self._metas[number].name, None) for number in arriving.bucket)
            return
        by_sender = self._messages[arriving.place]
        parts = parts_by_tensor(arriving.bucket, by_sender, arriving.flats, arriving.local)
        for number in arriving.bucket:
            need = self._needs[number]
            assert need is not None
            meta = self._metas[number]
            yield meta.name, assemble(meta.shape, need, parts.pop(number))


Named = tuple[str, torch.Tensor | None]


def on_one_stream(tensors: Iterable[Named], stream: torch.cuda.Stream) -> Iterator[Named]:
    """Yield `tensors`, all computed on `stream`, after the work queued so far on the present stream.

    vLLM's packed sender takes each bucket under another of its own streams. A gather that waited for a
    message under one of them has not waited under the next, and memory freed under one could be reused while
    another still reads it. So the consumer's stream waits for each tensor, and the tensor's memory waits for
    the consumer's stream.
    """
    # now, and not when the first tensor is taken: the weights were trained on the present stream
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return _computed_on(stream, iter(tensors))


def _computed_on(stream: torch.cuda.Stream, tensors: Iterator[Named]) -> Iterator[Named]:
    while True:
        with torch.cuda.stream(stream):
            item = next(tensors, None)
            ready = stream.record_event()
        taker = torch.cuda.current_stream(stream.device)
        taker.wait_event(ready)
        if item is None:
            return
        _, tensor = item
        if tensor is not None:
            tensor.record_stream(taker)
        yield item
