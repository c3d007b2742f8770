"""Many tensors as few flat buffers: the plan that sender and receiver share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ibpo.weights.source import TensorMeta

__all__ = ["Bucket", "pack", "plan_buckets", "unpack"]

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a weight update, as bytes in one buffer."""

    metas: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    """Of each tensor's first byte."""
    num_bytes: int


def plan_buckets(metas: Sequence[TensorMeta], limit: int) -> list[Bucket]:
    """Fill buckets of at most `limit` bytes in order; a larger tensor gets a bucket of its own."""
    buckets = []
    waiting: list[TensorMeta] = []
    offsets: list[int] = []
    end = 0
    for meta in metas:
        if waiting and end + meta.num_bytes > limit:
            buckets.append(Bucket(tuple(waiting), tuple(offsets), end))
            waiting, offsets, end = [], [], 0
        waiting.append(meta)
        offsets.append(end)
        end += -(-meta.num_bytes // ALIGNMENT) * ALIGNMENT
    if waiting:
        buckets.append(Bucket(tuple(waiting), tuple(offsets), end))
    return buckets


def pack(
    tensors: Iterable[tuple[str, torch.Tensor | None]], buckets: Sequence[Bucket]
) -> Iterator[torch.Tensor]:
    """The filled buffers, uint8 [num_bytes], each when its last tensor has come.

    Raises:
        ValueError: the tensors are not those of the plan.
    """
    stream = iter(tensors)
    for bucket in buckets:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for meta, offset in zip(bucket.metas, bucket.offsets, strict=True):
            name, tensor = next(stream, ("nothing", None))
            if tensor is None or TensorMeta(name, tensor.dtype, tuple(tensor.shape)) != meta:
                came = "" if tensor is None else f" {tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(
                    f"the weight source announced {meta.name} {meta.dtype} {meta.shape} and then yielded "
                    f"{name}{came}"
                )
            bytes_ = tensor.detach().contiguous().view(-1).view(torch.uint8)
            flat[offset : offset + meta.num_bytes].copy_(bytes_)
        yield flat
    for name, _ in stream:
        raise ValueError(f"the weight source yielded {name} beyond the {len(buckets)} buckets it announced")


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a buffer, as views of it."""
    for meta, offset in zip(bucket.metas, bucket.offsets, strict=True):
        yield meta.name, flat[offset : offset + meta.num_bytes].view(meta.dtype).view(meta.shape)
