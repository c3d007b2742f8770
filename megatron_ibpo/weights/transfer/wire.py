"""Messages between trainers and the workers of an engine before a weight update. They go through vLLM
pickled: vLLM's processes pass bytes on unchanged. Checksums of one pass over a tensor in place compare what
both sides hold."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_ibpo.weights.layout.regions import (
    Buckets,
    Message,
    Need,
    Sender,
    TensorMeta,
    box_name,
    plan_buckets,
    unpack,
)
from megatron_ibpo.weights.weight_errors import WeightMismatchError, WeightPlanError, listed


@dataclass(frozen=True)
class WirePlan:
    """The plan that a worker needs to receive an update."""

    metas: list[TensorMeta]
    senders: Sequence[tuple[Sender, ...]]
    """Senders of each tensor: (rank in the group, region)."""
    bucket_bytes: int

    @property
    def buckets(self) -> Buckets:
        return plan_buckets(self.metas, self.bucket_bytes)


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
    """Return the needs of each worker of `engine`.

    Raises:
        WeightPlanError: names the tensors that no worker knows and the parameters that no tensor reaches.
    """
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
    """Return Σ (wᵢ + 1)·(2i + 1)·c mod 2⁶⁴ over the tensor's bytes taken as 32-bit words wᵢ.

    Each word has its own odd multiplier, so that any single wrong word, and values that changed places,
    change the sum.
    """
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
        box_name(metas[part.number].name, part.box, metas[part.number].shape): checksum(view)
        for part, view in zip(message.parts, unpack(message, flat), strict=True)
    }


def compare_checksums(sent: Mapping[str, int], receipts: Sequence[Mapping[str, int]]) -> None:
    """Compare what was sent with what the workers received.

    Args:
        receipts: receipts of one engine's workers, which may have received different parts.

    Raises:
        WeightMismatchError: a worker received something other than was sent, or no worker received it; names
            the first.
    """
    wrong = {name for receipt in receipts for name in receipt if sent.get(name) != receipt[name]}
    wrong |= sent.keys() - {name for receipt in receipts for name in receipt}
    if wrong:
        raise WeightMismatchError(
            f"{len(wrong)} of {len(sent)} tensors of a weight update reached the engine changed or not at "
            f"all: {listed(sorted(wrong))}"
        )
