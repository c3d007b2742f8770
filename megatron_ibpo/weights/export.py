"""Megatron parameters as whole Hugging Face tensors, one bucket at a time.

Names are those of Hugging Face checkpoints with one tensor per expert, which both transformers and
vLLM's `load_weights` take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ibpo.shape import ModelShape
from megatron_ibpo.weights.maps import Entry, weight_map
from megatron_ibpo.weights.place import Place, my_place, parameters_by_global_name
from megatron_ibpo.weights.source import TensorMeta

__all__ = ["HFExport"]


@dataclass(frozen=True)
class _Task:
    """An entry and the ranks that send its shards, in shard order."""

    entry: Entry
    senders: tuple[int, ...]

    def numel(self) -> int:
        """Elements of one shard."""
        return sum(torch.Size(piece.shard_shape(len(self.senders))).numel() for piece in self.entry.pieces)


class HFExport:
    """The model's weights, gathered to global rank 0.

    Iterating is collective: every trainer rank must iterate to the end. It yields (name, tensor) in the
    order of `metadata()`; the tensor is whole on rank 0, on the parameters' device and in their dtype,
    and None elsewhere. A yielded tensor may share memory with the model's parameters.
    """

    def __init__(self, chunks: list[Any], shape: ModelShape, *, bucket_bytes: int = 512 * 1024**2):
        """Collective. `chunks`: from `build_model`, wrapped by DDP or not.

        Args:
            bucket_bytes: whole tensors that rank 0 may hold at once, in bytes; at least one entry.
        """
        place = my_place(shape, chunks)
        self._rank = dist.get_rank()
        self._parameters = dict(parameters_by_global_name(chunks, place))
        first = next(iter(self._parameters.values()))
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, place)
        self._buckets = _plan(shape, places, bucket_bytes // self.dtype.itemsize)

    def metadata(self) -> list[TensorMeta]:
        """What iterating will yield, in order; the same on every rank, without communication."""
        return [
            TensorMeta(piece.name, self.dtype, piece.shape)
            for bucket in self._buckets
            for task in bucket
            for piece in task.entry.pieces
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        for bucket in self._buckets:
            shards = self._exchange(bucket)
            for task in bucket:
                for number, piece in enumerate(task.entry.pieces):
                    if self._rank == 0:
                        parts = [shards[rank][task.entry.name][number] for rank in task.senders]
                        yield piece.name, piece.merge(parts)
                    else:
                        yield piece.name, None

    def _exchange(self, bucket: list[_Task]) -> dict[int, dict[str, list[Tensor]]]:
        """Send this rank's shards of the bucket to rank 0 in one message; there, everybody's: shards of
        an entry's pieces by rank and entry name."""
        own = {
            task.entry.name: task.entry.part(self._parameters[task.entry.name].detach())
            for task in bucket
            if self._rank in task.senders
        }
        if self._rank != 0:
            if own:
                dist.send(torch.cat([part.reshape(-1) for parts in own.values() for part in parts]), dst=0)
            return {}
        shards = {0: own}
        for sender in sorted({rank for task in bucket for rank in task.senders} - {0}):
            shards[sender] = self._receive(sender, [task for task in bucket if sender in task.senders])
        return shards

    def _receive(self, sender: int, tasks: list[_Task]) -> dict[str, list[Tensor]]:
        flat = torch.empty(sum(task.numel() for task in tasks), dtype=self.dtype, device=self.device)
        dist.recv(flat, src=sender)
        received: dict[str, list[Tensor]] = {}
        taken = 0
        for task in tasks:
            received[task.entry.name] = []
            for piece in task.entry.pieces:
                size = torch.Size(piece.shard_shape(len(task.senders)))
                received[task.entry.name].append(flat[taken : taken + size.numel()].view(size))
                taken += size.numel()
        return received


def _plan(shape: ModelShape, places: list[Place], bucket_numel: int) -> list[list[_Task]]:
    """Entries in checkpoint order, in buckets; every HF tensor once."""
    buckets: list[list[_Task]] = [[]]
    filled = 0
    seen: set[str] = set()
    for entry in weight_map(shape).values():
        if entry.pieces[0].name in seen:  # the head of tied embeddings
            continue
        seen.update(piece.name for piece in entry.pieces)
        numel = sum(torch.Size(piece.shape).numel() for piece in entry.pieces)
        if filled and filled + numel > bucket_numel:
            buckets.append([])
            filled = 0
        buckets[-1].append(_Task(entry, _senders(entry, places)))
        filled += numel
    return buckets


def _senders(entry: Entry, places: list[Place]) -> tuple[int, ...]:
    """The first rank that holds each shard; one rank if every shard is the whole."""
    by_shard: dict[int, int] = {}
    for rank, place in enumerate(places):
        if place.holds(entry):
            shard, _size = place.shard(entry)
            by_shard.setdefault(shard, rank)
    if all(piece.cut is None for piece in entry.pieces):
        return (by_shard[0],)
    return tuple(by_shard[shard] for shard in sorted(by_shard))
