"""Weights between GPUs, through vLLM's own transports: nccl to other GPUs, ipc on shared ones.

Only the control plane is ours: each engine's owner talks to it, while vLLM's classes would have trainer
rank 0 talk to all. Type-checked against vLLM 0.32.0; needs CUDA, and has not been run without it.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from megatron_ibpo.weights.layout.gather import Gather
from megatron_ibpo.weights.layout.regions import TensorMeta, WeightSource
from megatron_ibpo.weights.transfer.checksum import checksum
from megatron_ibpo.weights.transfer.link import EngineLink, Failures, Sent, ask, collect, start
from megatron_ibpo.world import World, own_address


class NcclTransport:
    """One NCCL group of trainer rank 0 and the workers of all engines.

    vLLM's class broadcasts whole tensors from rank 0, so every worker receives what its engine's other
    workers need too; `Sent` says how much that is. Gathering goes on while vLLM broadcasts: its two packed
    buffers and ours are a quarter of a bucket each.
    """

    shared_group = True

    def __init__(
        self, world: World, num_engines: int, workers_per_engine: int, bucket_bytes: int, timeout: float
    ) -> None:
        self._world = world
        self._num_engines = num_engines
        self._workers = workers_per_engine
        self._size = 1 + num_engines * workers_per_engine
        self._bucket_bytes = max(1, bucket_bytes // 4)
        self._timeout = timeout
        self._sender: NCCLTrainerWeightTransferEngine | None = None
        self._gather: Gather | None = None

    def connect(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]
    ) -> Failures:
        """Meet all engines; with a group in common they can only be met together."""
        host, port = self._world.on_rank_0(lambda: (own_address(), _free_port()))

        def place(engine: int) -> tuple[dict[str, Any]]:
            info = NCCLWeightTransferInitInfo(
                master_address=host,
                master_port=port,
                rank_offset=1 + engine * self._workers,
                world_size=self._size,
                packed=True,
                packed_buffer_size_bytes=self._bucket_bytes,
            )
            return (worker_init_payload(info),)

        failures = start(links, "init_weight_transfer", place)
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(
                host,
                port,
                self._size,
                packed_buffer_size_bytes=self._bucket_bytes,
                rank=self._world.rank,
            ),
            client=_Uninvolved(),
            source=_Adapted([], ()),
        )
        self._gather = Gather(source, to=0, bucket_bytes=self._bucket_bytes, device=self._world.device)
        collect(links, failures, self._timeout)
        return failures

    def send(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int], *, check: bool
    ) -> Sent:
        """Send one pass over `source` to all engines."""
        assert self._sender is not None
        assert self._gather is not None
        metas = source.metadata()
        info = NCCLWeightTransferUpdateInfo(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
        )
        failures = start(links, "update_weights", lambda _: (vars(info),))
        sums: dict[str, int] = {}
        recorded = _recorded(self._gather, sums) if check and self._world.is_rank_0 else self._gather
        self._sender.source = _Adapted(metas, recorded)
        self._sender.send_weights()
        collect(links, failures, self._timeout)
        num_bytes = _num_bytes(metas) * self._num_engines if self._world.is_rank_0 else 0
        return Sent(failures, num_bytes * self._workers, num_bytes, sums)


class IpcTransport:
    """Memory handles to engines on the trainers' own GPUs: each of an engine's workers opens the buffer of
    the trainer rank on its GPU, and takes whole tensors from it. Every rank therefore gathers every bucket,
    each shard broadcast by the rank that holds it."""

    shared_group = False

    def __init__(self, world: World, workers_per_engine: int, bucket_bytes: int, timeout: float) -> None:
        self._world = world
        self._workers = workers_per_engine
        self._bucket_bytes = max(1, bucket_bytes // 4)
        self._timeout = timeout
        self._gather: Gather | None = None

    def connect(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]
    ) -> Failures:
        """Agree on packed buffers; there is no group to join."""
        self._gather = Gather(source, to=None, bucket_bytes=self._bucket_bytes, device=self._world.device)
        failures: Failures = {}
        ask(links, failures, self._timeout, "init_weight_transfer", {"packed": True})
        return failures

    def send(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int], *, check: bool
    ) -> Sent:
        """Hand one pass over `source` to `engines`, bucket by bucket."""
        assert self._gather is not None
        metas = source.metadata()
        client = _Relay(links, self._timeout)
        sums: dict[str, int] = {}
        recorded = _recorded(self._gather, sums) if check and self._world.is_rank_0 else self._gather
        sender = IPCTrainerWeightTransferEngine.trainer_init(
            IPCTrainerInitInfo(
                packed=True,
                packed_buffer_size_bytes=max(self._bucket_bytes, *(meta.num_bytes for meta in metas)),
                rank=0 if links else 1,  # to vLLM rank 0 is who hands over handles: here every owner
            ),
            client=client,
            source=_Adapted(metas, recorded),
        )
        sender.send_weights()
        num_bytes = _num_bytes(metas) * len(engines) if self._world.is_rank_0 else 0
        return Sent(client.failures, num_bytes * self._workers, num_bytes, sums)


class _Uninvolved:
    """A client for vLLM's trainer side that leaves the control plane to the owners."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


class _Relay(_Uninvolved):
    """Passes the buckets on to the engines that this rank owns."""

    def __init__(self, links: Mapping[int, EngineLink], timeout: float) -> None:
        self._links = dict(links)
        self._timeout = timeout
        self.failures: Failures = {}

    def update_weights(self, update_info: Any) -> None:
        ask(self._links, self.failures, self._timeout, "update_weights", update_info)


class _Adapted(VllmWeightSource):
    """Our source as vLLM 0.32 wants it. (0.33 makes `metadata` a property and renames `__iter__`.)"""

    def __init__(self, metas: Sequence[TensorMeta], tensors: Any) -> None:
        self._metas = [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in metas]
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)


def _recorded(tensors: Gather, sums: dict[str, int]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The tensors, with their checksums noted as they pass."""
    for name, tensor in tensors:
        assert tensor is not None
        sums[name] = checksum(tensor)
        yield name, tensor


def _num_bytes(metas: Sequence[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
