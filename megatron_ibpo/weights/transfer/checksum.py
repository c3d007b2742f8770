"""A checksum that costs one pass over a tensor where it lies, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["WeightMismatchError", "checksum", "compare_checksums"]

MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd, as a signed 64-bit number
CHUNK_WORDS = 16 * 1024**2
SHOWN = 5


class WeightMismatchError(RuntimeError):
    """An engine does not have the weights that were sent to it."""


def checksum(tensor: torch.Tensor) -> int:
    """Σ (wᵢ + 1)·(2i + 1)·c mod 2⁶⁴ over the tensor's bytes taken as 32-bit words wᵢ.

    Each word has its own odd multiplier, so that any single wrong word, and values that changed places,
    change the sum.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := -data.numel() % 4:
        data = torch.cat([data, data.new_zeros(rest)])
    words = data.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS].long()
        odd = torch.arange(start, start + chunk.numel(), device=words.device).mul_(2).add_(1)
        total += int((chunk.add_(1).mul_(odd).mul_(MULTIPLIER)).sum())
    return total % 2**64


def compare_checksums(sent: Mapping[str, int], received: Mapping[str, int]) -> None:
    """
    Raises:
        WeightMismatchError: they differ; names the first tensors that do.
    """
    wrong = [name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name)]
    if wrong:
        shown = ", ".join(sorted(wrong)[:SHOWN])
        raise WeightMismatchError(
            f"{len(wrong)} of {len(sent)} tensors of a weight update reached the engine changed or not at "
            f"all: {shown}"
        )
