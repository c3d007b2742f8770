"""One weight update of running engines, the same over every transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from megatron_ibpo.weights.source import TensorMeta, WeightSource
from megatron_ibpo.weights.transfer.checksum import checksum, compare_checksums
from megatron_ibpo.weights.transfer.link import EngineLink, Failures, ask
from megatron_ibpo.world import World

__all__ = ["Transport", "update_engines"]


class Transport(Protocol):
    """Carries tensors from the trainers to engines. Methods are collective over all trainer ranks."""

    shared_group: bool
    """All engines meet in one group, so that one failing breaks it for all."""

    def connect(self, links: Mapping[int, EngineLink], engines: Sequence[int]) -> Failures:
        """Meet `engines`; `links` are those of them that this rank owns."""
        ...

    def send(self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]) -> Failures:
        """Send one pass over `source` to `engines`, which wait for it."""
        ...


def update_engines(
    transport: Transport,
    world: World,
    source: WeightSource,
    version: int,
    links: Mapping[int, EngineLink],
    engines: Sequence[int],
    *,
    sleeping: bool,
    check: bool,
) -> Failures:
    """Give idle `engines` the weights of `source` as policy `version`; collective.

    Sleeping engines wake in the order that needs the least memory: weights, update, KV cache.

    Args:
        links: those of `engines` that this rank owns.
        check: compare checksums of every tensor as sent and as received.

    Returns:
        the failures that this rank saw.

    Raises:
        WeightMismatchError: on the ranks whose engines received something else than was sent.
    """
    failures: Failures = {}
    if sleeping:
        ask(links, failures, "wake", "weights")
    ask(links, failures, "start_weight_update", check)
    sent: dict[str, int] = {}
    passing = _Recorded(source, sent) if check else source
    failures |= transport.send(passing, _without(links, failures), engines)
    receipts = ask(_without(links, failures), failures, "finish_weight_update", version)
    if sleeping:
        ask(_without(links, failures), failures, "wake", "kv_cache")
    if check:
        sent = world.on_driver(lambda: sent)
        for receipt in [worker for workers in receipts.values() for worker in workers]:
            compare_checksums(sent, receipt)
    return failures


class _Recorded:
    """A source that notes the checksums of what passes."""

    def __init__(self, source: WeightSource, sums: dict[str, int]) -> None:
        self._source = source
        self._sums = sums

    def metadata(self) -> list[TensorMeta]:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in self._source:
            if tensor is not None:
                self._sums[name] = checksum(tensor)
            yield name, tensor


def _without(links: Mapping[int, EngineLink], failures: Failures) -> dict[int, EngineLink]:
    return {engine: link for engine, link in links.items() if engine not in failures}
