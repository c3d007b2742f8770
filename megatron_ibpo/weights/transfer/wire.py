"""Messages between trainers and the workers of an engine before a weight update, checksums of what both sides
hold, and the rehearsal: a tensor-parallel worker copies its shard out of every tensor that it gets, and which
part that is is learnt from tensors of zeros that record reads.

Messages go through vLLM pickled: vLLM's processes pass bytes on unchanged.
"""

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ibpo.weights import WeightMismatchError, WeightPlanError, listed
from megatron_ibpo.weights.layout import regions
from megatron_ibpo.weights.layout.regions import Box, Message, Need, Sender, TensorMeta


@dataclass(frozen=True)
class WirePlan:
    """The plan that a worker needs to receive an update."""

    metas: list[TensorMeta]
    senders: Sequence[tuple[Sender, ...]]
    """Senders of each tensor: (rank in the group, region)."""
    bucket_bytes: int


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a rehearsal."""

    needs: list[Need | None]
    """Needs of each tensor."""
    forgotten: list[str]
    """Parameters of its model that no tensor reached."""
    error: str | None
    """Reason why loading failed, if it did."""


def read_answers(
    engine: int, pickled: Sequence[bytes], metas: Sequence[TensorMeta]
) -> list[list[Need | None]]:
    """Return the needs of each worker of `engine`. Raises WeightPlanError, which names the tensors that no
    worker knows and the parameters that no tensor reaches."""
    replies: list[Answer] = [pickle.loads(answer) for answer in pickled]
    for answer in replies:
        if answer.error:
            raise WeightPlanError(f"engine {engine} cannot load the trainer's tensors: {answer.error}")
    needs = [answer.needs for answer in replies]
    unknown = [meta.name for meta, of_workers in zip(metas, zip(*needs, strict=True), strict=True)
               if all(need is None for need in of_workers)]  # fmt: skip
    forgotten = sorted({name for answer in replies for name in answer.forgotten})
    if unknown:
        raise WeightPlanError(f"engine {engine} has no place for {listed(unknown)} of the trainer")
    if forgotten:
        raise WeightPlanError(f"the trainer's tensors do not cover {listed(forgotten)} of engine {engine}")
    return needs


MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd, as a signed 64-bit number
CHUNK_WORDS = 16 * 1024**2


def checksum(tensor: torch.Tensor) -> int:
    """Return Σ (wᵢ + 1)·(2i + 1)·c mod 2⁶⁴ over the tensor's bytes taken as 32-bit words wᵢ. Each word has
    its own odd multiplier, so that any single wrong word, and values that changed places, change the sum."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if padding := -data.numel() % 4:
        data = torch.cat([data, data.new_zeros(padding)])
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS].long()
        odd = torch.arange(start, start + chunk.numel(), device=words.device).mul_(2).add_(1)
        total += int((chunk.add_(1).mul_(odd).mul_(MULTIPLIER)).sum())
    return total % 2**64


def part_checksums(message: Message, flat: torch.Tensor, metas: Sequence[TensorMeta]) -> dict[str, int]:
    """Return the checksum of each part of a message, by its tensor's name and bounds."""
    return {
        regions.box_name(metas[part.number].name, part.box, metas[part.number].shape): checksum(view)
        for part, view in zip(message.parts, regions.unpack(message, flat), strict=True)
    }


def compare_checksums(sent: Mapping[str, int], receipts: Sequence[Mapping[str, int]]) -> None:
    """Compare what was sent with the receipts of one engine's workers, which may have received different
    parts. Raises WeightMismatchError if a worker received something other than was sent, or none received
    it."""
    wrong = {name for receipt in receipts for name in receipt if sent.get(name) != receipt[name]}
    wrong |= sent.keys() - set().union(*receipts)
    if wrong:
        raise WeightMismatchError(
            f"{len(wrong)} of {len(sent)} tensors of a weight update reached the engine changed or not at "
            f"all: {listed(sorted(wrong))}"
        )


HARMLESS = {
    "__get__", "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "ndimension", "get_device", "untyped_storage",
    "__len__", "requires_grad_",
}  # fmt: skip
"""Tensor functions that do not read its values."""


@dataclass
class _Reads:
    """A record of what was read of one tensor."""

    meta: TensorMeta
    boxes: set[Box] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Dtypes that it was copied into."""

    def note(self, view: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.boxes.add(_box_of(view, self.meta))
        self.dtypes.add(self.meta.dtype if dtype is None else dtype)

    def need(self) -> Need | None:
        if not self.boxes:
            return None
        boxes = tuple(sorted(self.boxes))
        if any(regions.intersect(a, b) for number, a in enumerate(boxes) for b in boxes[:number]):
            boxes = (regions.full_box(self.meta.shape),)
        dtype = next(iter(self.dtypes)) if len(self.dtypes) == 1 else self.meta.dtype
        narrower = dtype.is_floating_point and dtype.itemsize < self.meta.dtype.itemsize
        return Need(dtype if narrower else self.meta.dtype, boxes)


class Rehearsal:
    """Zeros under the names and shapes of tensors to come, and a record of what was read of them. A plain
    copy is recorded with its bounds and its target precision, in which the tensor may then travel. Any other
    operation on values counts as reading all of its operand."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._reads = [_Reads(meta) for meta in metas]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors for a model's `load_weights`. They take no memory: they are never written to."""
        for reads in self._reads:
            zeros = torch.zeros(reads.meta.shape, dtype=reads.meta.dtype)
            yield reads.meta.name, _watched(zeros, reads)

    def needs(self) -> list[Need | None]:
        """Return, for each tensor, what was read; None if nothing was."""
        return [reads.need() for reads in self._reads]


class _Watched(torch.Tensor):
    """A tensor that records reads of it and of its views."""

    reads: _Reads

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        watched = list(_watched_in((args, kwargs)))
        if func is torch.Tensor.copy_ and not isinstance(args[0], cls):
            for source in watched:
                source.reads.note(source, args[0].dtype)
            return result
        views = _views(result, watched)
        if views is not None:
            return views
        if getattr(func, "__name__", "") not in HARMLESS:
            for source in watched:
                source.reads.note(source, None)
        return result


def _watched(tensor: torch.Tensor, reads: _Reads) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        view = tensor.as_subclass(_Watched)
    view.reads = reads
    return view


def _watched_in(arguments: Any) -> Iterator[_Watched]:
    """Yield the watched tensors among arguments, at any depth."""
    if isinstance(arguments, _Watched):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _watched_in(list(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for item in arguments:
            yield from _watched_in(item)


def _views(result: Any, watched: list[_Watched]) -> Any:
    """Return the result, watched, if it is one or several views of a watched tensor; otherwise None."""
    if isinstance(result, tuple | list):
        views = [_views(item, watched) for item in result]
        return type(result)(views) if views and all(view is not None for view in views) else None
    if not isinstance(result, torch.Tensor):
        return None
    for source in watched:
        if _address(result) == _address(source):
            return _watched(result, source.reads)
    return None


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _box_of(view: torch.Tensor, meta: TensorMeta) -> Box:
    """Return the bounds of a view in the contiguous tensor that it was cut from; if it is no box, the rows
    that it touches."""
    with torch._C.DisableTorchFunctionSubclass():
        dtype, sizes, strides = view.dtype, tuple(view.shape), view.stride()
        offset = int(view.storage_offset())
    if dtype != meta.dtype or not meta.shape or 0 in sizes:
        return regions.full_box(meta.shape)
    rows = math.prod(meta.shape[1:])
    steps = [math.prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape))]
    if list(strides) == steps and len(sizes) == len(meta.shape):
        box, remaining = [], offset
        for step, size, limit in zip(steps, sizes, meta.shape, strict=True):
            start, remaining = divmod(remaining, step)
            if start + size > limit:
                break
            box.append((start, start + size))
        else:
            return tuple(box)
    last = offset + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return ((offset // rows, last // rows + 1), *regions.full_box(meta.shape[1:]))
