"""Weights that travel between GPUs are read once they are there, and their memory is used again after that.

The streams are a stand-in on a CPU; the gather and vLLM's packed sender and receiver are the real ones.
"""

import importlib.util
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unwatched

from megatron_ibpo.weights.layout import gather
from megatron_ibpo.weights.layout.regions import pack
from support.weight_sources import DividedWeights


def merge(clock, other):
    """Clocks and events hold how many operations of each stream, by its number, are over."""
    for stream, ticks in other.items():
        clock[stream] = max(ticks, clock.get(stream, 0))


class Stream:
    device = torch.device("cpu")

    def __init__(self, of):
        self.of, self.number, self.clock = of, len(of.streams), {}
        of.streams.append(self)

    def record_event(self):
        return dict(self.clock)

    def wait_event(self, event):
        merge(self.clock, event)

    def wait_stream(self, stream):
        merge(self.clock, stream.clock)

    def synchronize(self):
        merge(self.of.host, self.clock)


class Device(TorchDispatchMode):
    """All streams of one GPU, and the memory that operations touched.

    Operations run at once and in order, so values are right whatever the code does; whether a GPU would have
    to get them right is told by vector clocks. Memory that is freed is used again by the stream under which
    it was taken, at once, but after what streams noted by `record_stream` had been given until then.
    """

    def __init__(self):
        super().__init__()
        self.streams, self.host, self.memory, self.races = [], {}, {}, []
        self.current = Stream(self)

    @contextmanager
    def under(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Give every operation to the current stream."""
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata: tensor for tensor in tensors_in(args)}
        written = {
            tensor.untyped_storage()._cdata: tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
        }
        made = [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in given]
        if written or made:  # else it is a view
            reads = [tensor for key, tensor in given.items() if key not in written]
            self.touch(str(func), reads, [*written.values(), *made])
        return result

    def touch(self, what, reads, writes):
        """An operation of the current stream, after all that it and the host know to be over."""
        stream = self.current
        merge(stream.clock, self.host)
        tick = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensor in reads:
            memory = self.of(tensor)
            self.check_order(f"{what} reads what is still written", stream, memory.written)
            memory.read[stream.number] = (stream, tick)
        for tensor in writes:
            memory = self.of(tensor)
            for earlier in (memory.written, *memory.read.values()):
                self.check_order(f"{what} writes over what is still used", stream, earlier)
            memory.written, memory.read = (stream, tick), {}

    def of(self, tensor):
        """Under which stream a tensor's storage was taken, and in which operations written and read last."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            new = SimpleNamespace(stream=self.current, written=None, read={}, noted=set())
            self.memory[storage._cdata] = new
            weakref.finalize(storage, self.free, storage._cdata)
        return self.memory[storage._cdata]

    def free(self, key):
        memory = self.memory.pop(key)
        for earlier in filter(None, (memory.written, *memory.read.values())):
            if earlier[0].number not in memory.noted:
                self.check_order("memory is used again while still in use", memory.stream, earlier)

    def check_order(self, what, stream, earlier):
        if earlier is not None and earlier[0] is not stream:
            user, tick = earlier
            if max(stream.clock.get(user.number, 0), self.host.get(user.number, 0)) < tick:
                self.races.append(f"{what}: stream {stream.number} does not wait for {user.number}")


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, tuple | list) else []


@contextmanager
def simulated_streams():
    device = Device()
    with pytest.MonkeyPatch.context() as patch, device:
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(device))
        patch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
        patch.setattr(torch.cuda, "stream", device.under)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.Tensor, "record_stream", lambda t, stream: device.of(t).noted.add(stream.number))
        yield device


SHAPES = {f"layer{number // 3}.{'abc'[number % 3]}": (4 + number, 8) for number in range(18)}
BUCKET = 1000  # bytes: a few tensors


def vllm_transfer() -> Any:
    """vLLM's packed sending and receiving, without the rest of it, whose import takes seconds."""
    vllm: Any = importlib.util.find_spec("vllm")
    path = Path(vllm.origin).parent / "distributed/weight_transfer/packed_tensor.py"
    spec: Any = importlib.util.spec_from_file_location("packed_tensor", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def halves(rank):
    """Weights of which either of two ranks holds half the rows."""
    draw = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return DividedWeights(drawn, rank, 2)


class OtherRank:
    """torch.distributed as the gather of rank 0 sees it: rank 1 sends its halves, on a stream that torch's
    NCCL groups have of their own."""

    isend, irecv = "isend", "irecv"

    def __init__(self, device):
        self.device, self.stream = device, Stream(device)
        with unwatched():
            self.held = dict(enumerate(halves(1).local()))
        self.gather: Any = None

    def is_initialized(self):
        return False

    def P2POp(self, kind, flat, peer, tag):
        assert (kind, peer) == (self.irecv, 1)
        return flat, tag

    def batch_isend_irecv(self, operations):
        self.stream.wait_stream(self.device.current)
        for flat, place in operations:
            with unwatched():
                message = pack(self.gather._messages[place][1], self.held)
            with self.device.under(self.stream):
                flat.copy_(message)
        done, kept = self.stream.record_event(), list(operations)

        def wait():
            self.device.current.wait_event(done)
            kept.clear()

        return [SimpleNamespace(wait=wait)]


class Wire:
    """The tensors that vLLM's communicator sends from one side to the other, in order; `coming`: what
    arrives at the worker's end, in whole buckets."""

    def __init__(self, device, coming=None):
        self.device, self.coming, self.order, self.sent = device, coming, {}, []

    def broadcast(self, tensor, src):
        self.device.current.wait_event(self.order)  # NCCL keeps the order of one communicator's operations
        if self.coming is None:
            self.sent.append(tensor.clone())
        else:
            arrived, self.coming = self.coming.split([len(tensor), len(self.coming) - len(tensor)])
            tensor.copy_(arrived)
        self.order = self.device.current.record_event()


@pytest.mark.parametrize("own_stream", [True, False])
def test_gathered_weights_are_sent_after_they_have_arrived_and_race_without_a_stream_of_their_own(own_stream):
    source = halves(0)
    with simulated_streams() as device, pytest.MonkeyPatch.context() as patch:
        other = OtherRank(device)
        patch.setattr(gather, "dist", other)
        tensors: Any = gather.Gather(source, to=0, bucket_bytes=BUCKET, device="cpu")
        other.gather, wire = tensors, Wire(device)
        for tensor in source.tensors.values():
            tensor.mul_(1)
        if own_stream:
            tensors = gather.on_one_stream(tensors, torch.cuda.Stream())
        vllm_transfer().packed_nccl_broadcast_producer(
            iterator=iter(tensors), group=wire, src=0, post_iter_func=lambda item: item[1],
            buffer_size_bytes=BUCKET, num_buffers=2,
        )  # fmt: skip
        for tensor in source.tensors.values():
            tensor.mul_(1)
    expected = torch.cat([tensor.flatten() for tensor in source.tensors.values()])
    assert torch.equal(torch.cat(wire.sent).view(torch.float32), expected)
    assert any("reads what is still written" in race for race in device.races) == (not own_stream)
    assert own_stream == (device.races == [])


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_worker_with_one_buffer_loads_what_has_arrived_and_one_with_two_races(buffers):
    """Which is the reason for PACKED_BUFFERS. A model that vLLM reloads layer by layer keeps what comes until
    a layer is complete, and reads it then under whatever stream is the present one."""
    sent = halves(0).tensors
    parameters, kept = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, {}

    def load_weights(weights):
        for name, tensor in weights:
            kept[name] = tensor
            parts = [part for part in kept if part.startswith(name[:-1])]
            if len(parts) == 3:
                for part in parts:
                    fresh = torch.empty(SHAPES[part]).copy_(kept.pop(part))
                    parameters[part].copy_(fresh)

    with simulated_streams() as device:
        with unwatched():
            coming = torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent.values()])
        vllm_transfer().packed_nccl_broadcast_consumer(
            iterator=iter([(name, (list(t.shape), t.dtype)) for name, t in sent.items()]),
            group=Wire(device, coming), src=0, post_unpack_func=load_weights, buffer_size_bytes=BUCKET,
            num_buffers=buffers, device="cpu",
        )  # fmt: skip
    assert all(torch.equal(parameters[name], tensor) for name, tensor in sent.items())
    assert (device.races == []) == (buffers == 1)
