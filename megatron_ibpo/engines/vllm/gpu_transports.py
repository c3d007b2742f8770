"""Weights between GPUs, through vLLM's own transports: nccl to other GPUs, ipc on shared ones.

Only the control plane is this project's: each engine's owner talks to it, while vLLM's classes would have
trainer rank 0 talk to all. On a GPU only ipc has run, with a stand-in for vLLM's sender
(tests/gpu/parts/weight_update.py). On CPUs the nccl transport runs over gloo in place of NCCL
(tests/weights/test_gpu_transports.py).
"""

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.utils.nccl import unpinned_nccl_env

from megatron_ibpo.basics.distributed import World, open_store, own_address
from megatron_ibpo.basics.rendezvous import listen
from megatron_ibpo.weights.layout.regions import Gather, TensorMeta, WeightSource
from megatron_ibpo.weights.transfer.link import (
    EngineLink,
    Failures,
    Sent,
    UpdateOrder,
    ask,
    collect,
    start,
    without,
)
from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, run_join, say_lost
from megatron_ibpo.weights.transfer.wire import checksum

PACKED_BUFFERS = 1
"""Number of vLLM's packed buffers on either side. With two, vLLM loads a layer under one stream while memory
of a layer received under another is reused (tests/weights/test_weight_streams.py)."""


class NcclTransport:
    """An NCCL group of trainer rank 0 and the workers of all engines that a pass goes to. A new group is
    formed when the engines differ from last time, or have new processes. An engine that is lost during a pass
    ends the group; the others then start again in another.

    vLLM's class broadcasts whole tensors from rank 0, so every worker also receives what only its engine's
    other workers need; `Sent` counts it. Gathering goes on while vLLM broadcasts: its packed buffer and the
    two of `Gather` are a third of a bucket each.
    """

    in_one_call = False

    def __init__(self, world: World, workers_per_engine: int, bucket_bytes: int, timeout: float) -> None:
        self._world = world
        self._workers = workers_per_engine
        self._bucket_bytes = max(1, bucket_bytes // 3)
        self._timeout = timeout
        self._gather: Gather | None = None
        self._members: list[int] = []
        """Engines of the present group."""
        self._lost: Any = None
        """Store in which the group's members report that one is lost."""
        self._sender: NCCLTrainerWeightTransferEngine | None = None
        self._stream = torch.cuda.Stream(world.device)

    def connect(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]
    ) -> Failures:
        """Plan; the group with `engines` is formed at the first `send`."""
        self._gather = Gather(source, to=0, bucket_bytes=self._bucket_bytes, device=self._world.device)
        self._leave()
        return {}

    def send(
        self,
        source: WeightSource,
        links: Mapping[int, EngineLink],
        engines: Sequence[int],
        order: UpdateOrder,
    ) -> Sent:
        """Send one pass over `source` to all of `engines`, or whole weights to none of them."""
        sums: dict[str, int] = {}
        failures: Failures = {}
        if list(engines) != self._members:
            failures = self._meet(links, engines)
        if self._members:
            failures = self._send(source.metadata(), links, sums if order.check else None)
        must_repeat = any(self._world.all_gather(bool(failures)))
        if must_repeat:
            self._leave()
        num_bytes = _sent_bytes(self._world, source.metadata(), engines)
        return Sent(failures, num_bytes * self._workers, num_bytes, sums, must_repeat)

    def _send(
        self, metas: Sequence[TensorMeta], links: Mapping[int, EngineLink], sums: dict[str, int] | None
    ) -> Failures:
        assert self._sender is not None
        assert self._gather is not None
        info = NCCLWeightTransferUpdateInfo(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
        )
        failures = start(links, "update_weights", lambda _: (vars(info),))
        if not self._world.is_rank_0:
            self._sender.source = _Adapted(metas, self._gather)
            with _heard(links, failures, self._lost, self._timeout):
                self._sender.send_weights()
            return failures
        tensors = self._gather if sums is None else _recorded(self._gather, sums)
        self._sender.source = _Adapted(metas, on_one_stream(tensors, self._stream))
        group = self._sender.model_update_group
        with (
            _heard(links, failures, self._lost, self._timeout),
            ends_when_lost(self._lost, group, 2 * self._timeout),  # engines that hang fail earlier
        ):
            self._sender.send_weights()
        return failures

    def _meet(self, links: Mapping[int, EngineLink], engines: Sequence[int]) -> Failures:
        """Form a group with `engines`; with none of them if one fails."""
        self._leave()
        if not engines:
            return {}
        timeout = timedelta(seconds=self._timeout)
        store = open_store(own_address(), 0, timeout) if self._world.is_rank_0 else None
        listener = listen(own_address()) if self._world.is_rank_0 else None  # the port stays taken
        host, port, lost_port = self._world.on_rank_0(
            lambda: (own_address(), listener.getsockname()[1] if listener else 0, store.port if store else 0)
        )
        self._lost = store or dist.TCPStore(host, lost_port, timeout=timeout)
        size = 1 + len(engines) * self._workers
        offsets = {engine: 1 + place * self._workers for place, engine in enumerate(engines)}

        def place(engine: int) -> tuple[dict[str, Any]]:
            info = NCCLWeightTransferInitInfo(
                master_address=host,
                master_port=port,
                rank_offset=offsets[engine],
                world_size=size,
                packed=True,
                packed_buffer_size_bytes=self._bucket_bytes,
                packed_num_buffers=PACKED_BUFFERS,
            )
            return (worker_init_payload(info) | {"lost_port": lost_port, "timeout": 2 * self._timeout},)

        failures = start(links, "init_weight_transfer", place)
        reason = f"no NCCL group was formed with it within {self._timeout:g} seconds"
        with _heard(links, failures, self._lost, self._timeout):
            try:
                self._sender = self._join(listener, size)
            except Exception as error:  # the log says why the engines are replaced
                reason = f"no NCCL group was formed with it: {type(error).__name__}: {error}"
        if listener is not None:
            listener.close()  # no-op once the group's store has it
        formed, reason = self._world.on_rank_0(lambda: (self._sender is not None, reason))
        if not formed and not any(self._world.all_gather(bool(failures))):
            failures = {engine: RuntimeError(reason) for engine in links}
        if not any(self._world.all_gather(bool(failures))):
            self._members = list(engines)
        return failures

    def _join(self, listener: socket | None, size: int) -> NCCLTrainerWeightTransferEngine | None:
        """Return vLLM's sender, on rank 0 with a group whose store takes over `listener`. (vLLM's
        `trainer_init` would bind a port of its own, which another process may have taken by then.)"""
        sender = NCCLTrainerWeightTransferEngine(
            client=_Uninvolved(),
            source=_Adapted([], ()),
            is_sender=listener is not None,
            packed_buffer_size_bytes=self._bucket_bytes,
            packed_num_buffers=PACKED_BUFFERS,
        )
        if listener is None:
            return sender
        device = self._world.device.index or 0
        sender.model_update_group = run_join(
            lambda: _open_group(listener, size, device), device, self._lost, self._timeout
        )
        return sender if sender.model_update_group is not None else None

    def _leave(self) -> None:
        """End what is left of the present group."""
        if self._sender is not None and self._sender.model_update_group is not None:
            abort(self._sender.model_update_group)
        self._sender, self._lost, self._members = None, None, []


def _open_group(listener: socket, size: int, device: int) -> pynccl.PyNcclCommunicator:
    """Form an NCCL group as its rank 0, as vLLM's `stateless_init_process_group`."""
    host, port, *_ = listener.getsockname()
    group = StatelessProcessGroup.create(host, port, 0, size, listen_socket=listener)
    with unpinned_nccl_env():
        return pynccl.PyNcclCommunicator(group, device=device)


@contextmanager
def _heard(
    links: Mapping[int, EngineLink], failures: Failures, lost: dist.Store, timeout: float
) -> Iterator[None]:
    """Collect the engines' answers in the background: those that fail are added to `failures`, and the group
    learns at once that it has lost a member."""

    def hear(engine: int) -> Failures:
        failed: Failures = {}
        collect({engine: links[engine]}, failed, timeout)
        if failed:
            say_lost(lost)
        return failed

    if failures:
        say_lost(lost)
    remaining = without(links, failures)
    with ThreadPoolExecutor(max(1, len(remaining))) as threads:
        replies = [threads.submit(hear, engine) for engine in remaining]
        yield
    for reply in replies:
        failures |= reply.result()


Named = tuple[str, torch.Tensor | None]


def on_one_stream(tensors: Iterable[Named], stream: torch.cuda.Stream) -> Iterator[Named]:
    """Yield `tensors`, all computed on `stream`, after the work queued so far on the present stream.

    vLLM's packed sender takes each bucket under another of its own streams. A gather that waited for a
    message under one of them has not waited under the next, and memory freed under one could be reused while
    another still reads it. So the consumer's stream waits for each tensor, and the tensor's memory waits for
    the consumer's stream.
    """
    remaining = iter(tensors)

    def computed() -> Iterator[Named]:
        while True:
            with torch.cuda.stream(stream):
                item = next(remaining, None)
                ready = stream.record_event()
            taker = torch.cuda.current_stream(stream.device)
            taker.wait_event(ready)
            if item is None:
                return
            if item[1] is not None:
                item[1].record_stream(taker)
            yield item

    # now, and not when the first tensor is taken: the weights were trained on the present stream
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return computed()


class IpcTransport:
    """A transport of memory handles to engines on the trainers' own GPUs. Each of an engine's workers opens
    the buffer of the trainer rank on its GPU, and takes whole tensors from it. Every rank therefore gathers
    every bucket, each shard broadcast by the rank that holds it."""

    in_one_call = False

    def __init__(self, world: World, workers_per_engine: int, bucket_bytes: int, timeout: float) -> None:
        self._world = world
        self._workers = workers_per_engine
        self._bucket_bytes = max(1, bucket_bytes // 4)
        self._timeout = timeout
        self._gather: Gather | None = None
        _use_count_places()

    def connect(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]
    ) -> Failures:
        """Agree on packed buffers; there is no group to join."""
        self._gather = Gather(source, to=None, bucket_bytes=self._bucket_bytes, device=self._world.device)
        failures: Failures = {}
        ask(links, failures, self._timeout, "init_weight_transfer", {"packed": True})
        return failures

    def send(
        self,
        source: WeightSource,
        links: Mapping[int, EngineLink],
        engines: Sequence[int],
        order: UpdateOrder,
    ) -> Sent:
        """Hand one pass over `source` to `engines`, bucket by bucket."""
        assert self._gather is not None
        metas = source.metadata()
        client = _Relay(links, self._timeout)
        sums: dict[str, int] = {}
        recorded = _recorded(self._gather, sums) if order.check and self._world.is_rank_0 else self._gather
        sender = _Lender.trainer_init(
            IPCTrainerInitInfo(
                packed=True,
                packed_buffer_size_bytes=max(self._bucket_bytes, *(meta.num_bytes for meta in metas)),
                rank=0 if links else 1,  # to vLLM, rank 0 hands over handles; here every owner does
            ),
            client=client,
            source=_Adapted(metas, recorded),
        )
        sender.send_weights()
        if self._world.rank // self._workers not in engines:
            sender.take_back()
        num_bytes = _sent_bytes(self._world, metas, engines)
        waits = (sender.num_waits, sender.wait_seconds)
        return Sent(client.failures, num_bytes * self._workers, num_bytes, sums, waits=waits)


def _use_count_places() -> tuple[int, int]:
    """Return where PyTorch's arguments of a lent buffer have its use count: handle and offset. Raises
    RuntimeError if PyTorch lends memory in another way than 2.11 and 2.13, which were read."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    try:
        places = names.index("ref_counter_handle"), names.index("ref_counter_offset")
        torch.UntypedStorage._release_ipc_counter_cuda  # noqa: B018
    except (ValueError, AttributeError):
        raise RuntimeError(
            f"torch {torch.__version__} lends GPU memory to other processes in an unknown way, so colocated "
            "engines cannot get weights; take torch 2.11 or 2.13, or --no-colocate"
        ) from None
    return places


class _Lender(IPCTrainerWeightTransferEngine):
    """vLLM's sender, on a rank whose engine may take no part. PyTorch keeps a lent buffer until its receiver
    releases it, and that rank's buffer has no receiver. Not run on GPUs."""

    _rebuild_arguments: tuple[Any, ...] | None = None
    """Arguments with which a worker rebuilds the buffer's tensor: PyTorch's `rebuild_cuda_tensor`."""
    num_waits = 0
    """Number of times that this rank waited for all others and for its GPU: one a bucket."""
    wait_seconds = 0.0

    def _all_gather_and_merge_handles(self, handles: list[dict[str, tuple]]) -> list[dict[str, tuple]]:
        for handle in handles:  # each of the same buffer, on this rank's GPU
            (self._rebuild_arguments,) = handle.values()
        began = time.monotonic()
        merged = super()._all_gather_and_merge_handles(handles)
        self.num_waits, self.wait_seconds = self.num_waits + 1, self.wait_seconds + time.monotonic() - began
        return merged

    def take_back(self) -> None:
        """Take back the memory of a buffer that no worker has opened."""
        if self._rebuild_arguments is not None:
            counter, offset = (self._rebuild_arguments[place] for place in _use_count_places())
            torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)  # as a worker does
            torch.cuda.ipc_collect()


class _Uninvolved:
    """A client for vLLM's trainer side that leaves the control plane to the owners."""

    def start_weight_update(self, *_: Any, **__: Any) -> None:
        pass

    init_weight_transfer_engine = update_weights = finish_weight_update = start_weight_update


class _Relay(_Uninvolved):
    """A relay of buckets to the engines that this rank owns."""

    def __init__(self, links: Mapping[int, EngineLink], timeout: float) -> None:
        self._links = dict(links)
        self._timeout = timeout
        self.failures: Failures = {}

    def update_weights(self, update_info: Any) -> None:
        ask(self._links, self.failures, self._timeout, "update_weights", update_info)


class _Adapted(VllmWeightSource):
    """The weight source as vLLM 0.32 wants it. (0.33 makes `metadata` a property and renames `__iter__`.)"""

    def __init__(self, metas: Sequence[TensorMeta], tensors: Any) -> None:
        self._metas = [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in metas]
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)


def _recorded(tensors: Gather, sums: dict[str, int]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the tensors, and record their checksums as they pass."""
    for name, tensor in tensors:
        assert tensor is not None
        sums[name] = checksum(tensor)
        yield name, tensor


def _sent_bytes(world: World, metas: Sequence[TensorMeta], engines: Sequence[int]) -> int:
    """Return the bytes of whole tensors for one worker of each engine; rank 0 counts for all."""
    return sum(meta.num_bytes for meta in metas) * len(engines) if world.is_rank_0 else 0
