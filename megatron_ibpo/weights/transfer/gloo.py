"""Weights over gloo: rank 0 of the trainers and the workers of one engine form a group of their own.

A group for each engine: an engine that dies takes no other with it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ibpo.weights.source import TensorMeta, WeightSource
from megatron_ibpo.weights.transfer.buckets import pack, plan_buckets, unpack
from megatron_ibpo.weights.transfer.link import TRANSFER_TIMEOUT_S, EngineLink, Failures, collect, start
from megatron_ibpo.world import World

__all__ = ["GlooTransport", "join_group", "receive"]

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=TRANSFER_TIMEOUT_S)


class GlooTransport:
    """The trainers' side. Methods are collective over all trainer ranks."""

    shared_group = False

    def __init__(self, world: World, workers_per_engine: int, bucket_bytes: int) -> None:
        self._world = world
        self._size = 1 + workers_per_engine
        self._bucket_bytes = bucket_bytes
        self._groups: dict[int, Any] = {}
        """On rank 0: the group of each engine."""

    def connect(self, links: Mapping[int, EngineLink], engines: Sequence[int]) -> Failures:
        """Meet `engines`; `links` are those of them that this rank owns."""
        hosts = self._world.all_gather(socket.gethostname())
        host = LOOPBACK if len(set(hosts)) == 1 else hosts[0]
        stores = {engine: _listen(host) for engine in engines} if self._world.is_driver else {}
        ports = self._world.on_driver(lambda: {engine: store.port for engine, store in stores.items()})
        failures = start(
            links,
            "init_weight_transfer",
            lambda engine: ({"address": host, "port": ports[engine], "size": self._size},),
        )
        unmet: Failures = {}
        for engine, store in stores.items():
            try:
                self._groups[engine] = open_group(store, host, 0, self._size)
            except RuntimeError as error:
                unmet[engine] = error
        collect(links, failures)
        return unmet | failures  # what the engine itself says tells more

    def send(self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]) -> Failures:
        """Send one pass over `source` to `engines`."""
        metas = source.metadata()
        info = {
            "names": [meta.name for meta in metas],
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
            "bucket_bytes": self._bucket_bytes,
        }
        failures = start(links, "update_weights", lambda _: (info,))
        unsent: Failures = {}
        if self._world.is_driver:
            for flat in pack(source, plan_buckets(metas, self._bucket_bytes)):
                unsent |= self._broadcast(flat, engines)
        else:
            for _ in source:  # gathering is collective
                pass
        collect(links, failures)
        return unsent | failures  # what the engine itself says tells more

    def _broadcast(self, flat: torch.Tensor, engines: Sequence[int]) -> Failures:
        """Send a buffer to the engines that still listen. One that stops listening is left out from then
        on, and the pass goes on, since the other ranks take part in it."""
        failures: Failures = {}
        for engine in engines:
            if group := self._groups.get(engine):
                try:
                    _broadcast(group, flat)
                except RuntimeError as error:
                    failures[engine] = error
                    del self._groups[engine]
        return failures


def open_group(store: Any, host: str, rank: int, size: int) -> Any:
    """A gloo group beside any other that the process has, whose members meet in `store` on `host`.

    Raises:
        RuntimeError: the others did not come in time.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    own = LOOPBACK if host == LOOPBACK else socket.gethostname()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def join_group(host: str, port: int, rank: int, size: int) -> Any:
    """`open_group` for those who come to the trainer's rank 0."""
    return open_group(dist.TCPStore(host, port, timeout=TIMEOUT), host, rank, size)


def receive(group: Any, metas: Sequence[TensorMeta], bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that rank 0 of `group` sends, in the order of `metas`."""
    for bucket in plan_buckets(metas, bucket_bytes):
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        _broadcast(group, flat)
        yield from unpack(bucket, flat)


def _listen(host: str) -> Any:
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def _broadcast(group: Any, flat: torch.Tensor) -> None:
    group.broadcast([flat], dist.BroadcastOptions()).wait()
