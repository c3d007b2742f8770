"""Regions of every tensor that ranks hold and receivers need, and the messages that follow from them.

A region is a box: (start, stop) along every dimension. Sender and receiver derive the same messages from the
same plain data, so that an update carries nothing but bytes. `Gather` assembles whole tensors from them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension of a tensor."""
LocalBoxes = Mapping[Box, Tensor]
"""Boxes of one tensor that a rank holds."""
Sender = tuple[int, Box]
"""(rank, the region of a tensor that it sends to receivers that need part of it)."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a checkpoint in Hugging Face format."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor, and the trainer ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


class WeightSource(Protocol):
    """The policy's weights under their Hugging Face names, as the trainer's ranks hold them. `metadata` and
    `regions` are equal on every rank and never change; nothing here communicates."""

    def metadata(self) -> list[TensorMeta]:
        """Return the tensors, in the order in which they are sent."""

    def regions(self) -> list[tuple[Region, ...]]:
        """Return, for each tensor, disjoint regions that cover it."""

    def local(self) -> Iterator[LocalBoxes]:
        """Yield, in one pass over the tensors, the regions that this rank holds, by their boxes; empty if it
        holds none. They may share memory with the model."""


@dataclass(frozen=True, slots=True)
class Need:
    """The part of one tensor that a receiver needs: disjoint boxes, in `dtype`."""

    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(_shape(box)) for box in self.boxes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """One box on its way: cut from `region` of tensor `number`, sent as `dtype`."""

    number: int
    region: Box
    box: Box
    dtype: torch.dtype
    offset: int
    """Offset of its first byte in the message."""

    @property
    def num_bytes(self) -> int:
        return math.prod(_shape(self.box)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """All the data that one sender has for one receiver in one bucket."""

    parts: tuple[Part, ...]
    num_bytes: int


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the overlap of two boxes; None if there is none."""
    overlap = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return overlap if all(start < stop for start, stop in overlap) else None


def box_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return `name`, with the bounds of `box` unless it is the whole tensor."""
    if box == full_box(shape):
        return name
    return f"{name}[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def need_all(metas: Sequence[TensorMeta]) -> list[Need | None]:
    """Return the needs of a receiver that takes every tensor whole."""
    return [Need(meta.dtype, (full_box(meta.shape),)) for meta in metas]


def plan_buckets(metas: Sequence[TensorMeta], limit: int) -> list[range]:
    """Return buckets of at most `limit` bytes: consecutive tensors, by number, that travel together."""
    return consecutive_runs([meta.num_bytes for meta in metas], limit)


def consecutive_runs(sizes: Sequence[int], limit: int) -> list[range]:
    """Split items into consecutive runs with a total size of at most `limit` each; a larger item is a run of
    its own."""
    runs: list[range] = []
    first, run_size = 0, 0
    for number, size in enumerate(sizes):
        if number > first and run_size + size > limit:
            runs.append(range(first, number))
            first, run_size = number, 0
        run_size += size
    return [*runs, range(first, len(sizes))] if sizes else runs


def choose_senders(
    metas: Sequence[TensorMeta], regions: Sequence[Sequence[Region]], *, prefer: int | None = None
) -> list[tuple[Sender, ...]]:
    """Choose one holder of every region: rank `prefer` if it holds it, else the one that sends least so
    far."""
    load: dict[int, int] = {}
    chosen = []
    for meta, parts in zip(metas, regions, strict=True):
        senders = []
        for region in parts:
            if prefer in region.ranks:
                rank = prefer
            else:
                rank = min(region.ranks, key=lambda rank: (load.get(rank, 0), rank))
                load[rank] = load.get(rank, 0) + math.prod(_shape(region.box)) * meta.dtype.itemsize
            senders.append((rank, region.box))
        chosen.append(tuple(senders))
    return chosen


def messages(
    bucket: range, senders: Sequence[Sequence[Sender]], needs: Sequence[Need | None]
) -> dict[int, Message]:
    """Return, for each sending rank, its data in `bucket` for a receiver with `needs`."""
    parts: dict[int, list[Part]] = {}
    ends: dict[int, int] = {}
    for number in bucket:
        need = needs[number]
        if need is None:
            continue
        for rank, region in senders[number]:
            for needed in need.boxes:
                box = intersect(region, needed)
                if box is None:
                    continue
                size = need.dtype.itemsize
                offset = -(-ends.get(rank, 0) // size) * size
                part = Part(number, region, box, need.dtype, offset)
                parts.setdefault(rank, []).append(part)
                ends[rank] = offset + part.num_bytes
    return {rank: Message(tuple(sent), ends[rank]) for rank, sent in parts.items()}


def pack(message: Message, local: Mapping[int, LocalBoxes], room: Tensor | None = None) -> Tensor:
    """Return the message as bytes, uint8 [num_bytes], from this rank's parts of the bucket's tensors. `room`
    is memory to write it to, uint8 [num_bytes]; None: fresh memory."""
    if room is None:
        room = receive_buffer(message, next(iter(local[message.parts[0].number].values())).device)
    for view, part in zip(unpack(message, room), local_parts(message, local), strict=True):
        view.copy_(part)
    return room


def local_parts(message: Message, local: Mapping[int, LocalBoxes]) -> list[Tensor]:
    """Return the message's parts as this rank holds them, in the source's dtype."""
    return [cut(local[part.number][part.region], part.region, part.box) for part in message.parts]


def receive_buffer(message: Message, device: torch.device | str) -> Tensor:
    return torch.empty(message.num_bytes, dtype=torch.uint8, device=device)


def unpack(message: Message, flat: Tensor) -> list[Tensor]:
    """Return the message's parts, as views of its bytes."""
    return [
        flat[part.offset : part.offset + part.num_bytes].view(part.dtype).view(_shape(part.box))
        for part in message.parts
    ]


def parts_by_tensor(
    bucket: range,
    by_sender: Mapping[int, Message],
    flats: Mapping[int, Tensor],
    local: Mapping[int, LocalBoxes] = {},
) -> dict[int, list[tuple[Box, Tensor]]]:
    """Return the parts of each tensor of a bucket that have arrived. `flats` are the messages' bytes by
    sender; a sender without any is this rank, which holds `local`."""
    parts: dict[int, list[tuple[Box, Tensor]]] = {number: [] for number in bucket}
    for sender, message in by_sender.items():
        views = unpack(message, flats[sender]) if sender in flats else local_parts(message, local)
        for part, view in zip(message.parts, views, strict=True):
            parts[part.number].append((part.box, view))
    return parts


def assemble(
    shape: Sequence[int], need: Need, arrived: Iterable[tuple[Box, Tensor]], *, blank: bool = False
) -> Tensor:
    """Return a tensor of `shape` in which the boxes of `need` are filled; without a copy if one part is the
    whole tensor. With `blank` the rest is NaN, which cannot be mistaken for weights, instead of undefined."""
    parts = list(arrived)
    if len(parts) == 1 and parts[0][0] == full_box(shape):
        return parts[0][1]
    device = parts[0][1].device
    tensor = torch.empty(tuple(shape), dtype=need.dtype, device=device)
    if blank and need.dtype.is_floating_point:
        tensor.fill_(math.nan)
    for box, part in parts:
        cut(tensor, full_box(shape), box).copy_(part)
    return tensor


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def cut(tensor: Tensor, region: Box, box: Box) -> Tensor:
    """Return the part `box` of a tensor that covers `region`."""
    inside = (slice(s - h, e - h) for (s, e), (h, _) in zip(box, region, strict=True))
    return tensor[tuple(inside)]


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


class Gather:
    """An iterator over whole tensors, collective over the default process group: every rank must iterate to
    the end. It yields (name, tensor) in the source's order: the whole tensor on ranks that get it, None
    elsewhere. While one bucket is in use the next one travels. A tensor may share memory with the model. On
    GPUs it has run on one only, where nothing comes from others."""

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
            while arriving.works:
                arriving.works.pop().wait()  # a work keeps its buffer
            yield from self._tensors(arriving)
            arriving = following

    def _post(self, place: int, local: Iterator[LocalBoxes]) -> _Arriving:
        """Start sending and receiving a bucket."""
        bucket = self._buckets[place]
        arriving = _Arriving(place, bucket, dict(zip(bucket, islice(local, len(bucket)), strict=True)))
        operations = []
        for sender, message in self._messages[place].items():
            mine = sender == self._rank
            gets = self._to in (self._rank, None)
            if (mine and self._to == self._rank) or not (mine or gets):
                continue  # this rank holds it already, or takes no part
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
