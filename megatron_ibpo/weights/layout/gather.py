"""Gathering of a weight source's whole tensors, on one trainer rank or on all; one bucket ahead. On
GPUs all of it is computed on one stream. It has run on one GPU only, where nothing comes from others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.weights.layout.regions import (
    LocalBoxes,
    WeightSource,
    assemble,
    choose_senders,
    messages,
    need_all,
    pack,
    parts_by_tensor,
    plan_buckets,
    receive_buffer,
)


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
