"""Weights that travel between GPUs are read once they are there, and their memory is used again after that.

The streams are a stand-in on a CPU; the gather and vLLM's packed sender and receiver are the
real ones. Not run on GPUs.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unwatched

from megatron_ibpo.weights.layout import gather
from megatron_ibpo.weights.layout.gather import Gather, on_one_stream
from megatron_ibpo.weights.layout.regions import pack
from support.weight_sources import DividedWeights

Clock = dict[int, int]
"""By stream: how many of its operations are over."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, ticks in other.items():
        clock[stream] = max(ticks, clock.get(stream, 0))


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = dict(clock)


class Stream:
    """As torch.cuda.Stream."""

    device = torch.device("cpu")

    def __init__(self, of: Device) -> None:
        self.of = of
        self.number = len(self.of.streams)
        self.of.streams.append(self)
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return f"stream {self.number}"

    def operate(self) -> int:
        """A new operation, after all that this stream and the host know to be over; its number."""
        merge(self.clock, self.of.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def record_event(self) -> Event:
        return Event(self.clock)

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        merge(self.clock, stream.clock)

    def synchronize(self) -> None:
        merge(self.of.host, self.clock)


class Memory:
    """What was done with one storage."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        """Under which it was taken."""
        self.noted: set[int] = set()
        """By `record_stream`."""
        self.written: tuple[Stream, int] | None = None
        self.read: dict[int, tuple[Stream, int]] = {}
        """By stream: the last reading."""


class Device:
    """All streams of one GPU, and the memory that operations touched.

    Operations run at once and in order, so values are right whatever the code does; whether a GPU would have
    to get them right is told by vector clocks. Memory that is freed is used again by the stream under which
    it was taken, at once, but after what streams noted by `record_stream` had been given until then.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.memory: dict[int, Memory] = {}
        self.races: list[str] = []
        self.current = Stream(self)

    @contextmanager
    def under(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def touch(self, what: str, stream: Stream, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """An operation of `stream`."""
        tick = stream.operate()
        for tensor in reads:
            memory = self.of(tensor)
            self._after(what, "reads what is still written", stream, memory.written)
            memory.read[stream.number] = (stream, tick)
        for tensor in writes:
            memory = self.of(tensor)
            for earlier in (memory.written, *memory.read.values()):
                self._after(what, "writes over what is still used", stream, earlier)
            memory.written, memory.read = (stream, tick), {}

    def of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(self.current)
            weakref.finalize(storage, self._freed, key)
        return self.memory[key]

    def note(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.of(tensor).noted.add(stream.number)

    def _freed(self, key: int) -> None:
        memory = self.memory.pop(key)
        for user, tick in filter(None, (memory.written, *memory.read.values())):
            if user.number not in memory.noted:
                self._after("memory", "is used again while still in use", memory.stream, (user, tick))

    def _after(self, what: str, wrong: str, stream: Stream, earlier: tuple[Stream, int] | None) -> None:
        if earlier is None:
            return
        user, tick = earlier
        known = max(stream.clock.get(user.number, 0), self.host.get(user.number, 0))
        if user is not stream and known < tick:
            self.races.append(f"{what} {wrong}: {stream} does not wait for {user}")


class _Watched(TorchDispatchMode):
    """Gives every operation to the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata: tensor for tensor in _tensors(args)}
        writes = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in given]
        is_view = not writes and not made
        if not is_view:
            written = {tensor.untyped_storage()._cdata for tensor in writes}
            reads = [tensor for key, tensor in given.items() if key not in written]
            self.device.touch(str(func), self.device.current, reads, [*writes, *made])
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@contextmanager
def simulated_streams() -> Iterator[Device]:
    device = Device()
    with ExitStack() as stack:
        for place, name, stand_in in (
            (torch.cuda, "Stream", lambda *_, **__: Stream(device)),
            (torch.cuda, "current_stream", lambda *_: device.current),
            (torch.cuda, "stream", device.under),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.Tensor, "record_stream", lambda tensor, stream: device.note(tensor, stream)),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        stack.enter_context(_Watched(device))
        yield device


SHAPES = {f"layer{number // 3}.{'abc'[number % 3]}": (4 + number, 8) for number in range(18)}
BUCKET = 1000
"""Bytes: a few tensors."""


def vllm_transfer() -> Any:
    """vLLM's packed sending and receiving, without the rest of it, whose import takes seconds."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "distributed/weight_transfer/packed_tensor.py"
    spec = importlib.util.spec_from_file_location("packed_tensor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def halves(rank: int) -> DividedWeights:
    """Weights of which either of two ranks holds half the rows."""
    draw = torch.Generator().manual_seed(0)
    return DividedWeights(
        {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}, rank, 2
    )


class Work:
    """Under way on the stream that torch's NCCL groups have of their own."""

    def __init__(self, device: Device, done: Event, kept: Any) -> None:
        self.device, self.done, self.kept = device, done, kept

    def wait(self) -> None:
        self.device.current.wait_event(self.done)
        self.kept = None


class OtherRank:
    """torch.distributed as the gather of rank 0 sees it: rank 1 sends its halves."""

    isend, irecv = "isend", "irecv"

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, Stream(device)
        with unwatched():
            self.held = dict(enumerate(halves(1).local()))
        self.gather: Any = None

    def is_initialized(self) -> bool:
        return False

    def P2POp(self, kind: str, flat: torch.Tensor, peer: int, tag: int) -> tuple[torch.Tensor, int]:
        assert (kind, peer) == (self.irecv, 1)
        return flat, tag

    def batch_isend_irecv(self, operations: list[tuple[torch.Tensor, int]]) -> list[Work]:
        self.stream.wait_stream(self.device.current)
        for flat, place in operations:
            with unwatched():
                message = pack(self.gather._messages[place][1], self.held)
            with self.device.under(self.stream):
                flat.copy_(message)
        return [Work(self.device, self.stream.record_event(), operations)]


class Wire:
    """The tensors that vLLM's communicator sends from one side to the other, in order."""

    def __init__(self, device: Device) -> None:
        self.device, self.order, self.sent = device, Event({}), []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.device.current.wait_event(self.order)  # NCCL keeps the order of one communicator's operations
        self.transfer(tensor)
        self.order = self.device.current.record_event()

    def transfer(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.clone())


def races_of_sending(tensors_of: Any, buffers: int = 2) -> list[str]:
    """Train, send all to a worker, train again; what was sent is checked here, what raced is returned."""
    source = halves(0)
    with simulated_streams() as device, pytest.MonkeyPatch.context() as patch:
        other = OtherRank(device)
        patch.setattr(gather, "dist", other)
        gathered = other.gather = Gather(source, to=0, bucket_bytes=BUCKET, device="cpu")
        wire = Wire(device)
        for tensor in source.tensors.values():
            tensor.mul_(1)
        vllm_transfer().packed_nccl_broadcast_producer(
            iterator=iter(tensors_of(gathered)), group=wire, src=0, post_iter_func=lambda item: item[1],
            buffer_size_bytes=BUCKET, num_buffers=buffers,
        )  # fmt: skip
        for tensor in source.tensors.values():
            tensor.mul_(1)
    expected = torch.cat([tensor.flatten() for tensor in source.tensors.values()])
    assert torch.equal(torch.cat(wire.sent).view(torch.float32), expected)
    return device.races


def test_gathered_weights_are_sent_after_they_have_arrived():
    assert races_of_sending(lambda gathered: on_one_stream(gathered, torch.cuda.Stream())) == []


def test_without_a_stream_of_its_own_the_gather_races_with_the_sender():
    races = races_of_sending(lambda gathered: gathered)
    assert any("reads what is still written" in race for race in races)


class Delivered(Wire):
    """The worker's end: what was sent arrives, whole buckets in order."""

    def __init__(self, device: Device, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__(device)
        self.coming = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])

    def transfer(self, tensor: torch.Tensor) -> None:
        arrived, self.coming = self.coming.split([len(tensor), len(self.coming) - len(tensor)])
        tensor.copy_(arrived)


class Layers:
    """A model that vLLM reloads layer by layer: what comes is kept until a layer is complete, and is then
    read under whatever stream is the present one."""

    def __init__(self) -> None:
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.kept: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.kept[name] = tensor
            layer = name.partition(".")[0]
            parts = [part for part in self.kept if part.startswith(f"{layer}.")]
            if len(parts) == 3:
                for part in parts:
                    fresh = torch.empty(SHAPES[part]).copy_(self.kept.pop(part))
                    self.parameters[part].copy_(fresh)


def races_of_receiving(buffers: int) -> list[str]:
    sent = halves(0).tensors
    model = Layers()
    with simulated_streams() as device:
        with unwatched():
            wire = Delivered(device, sent.values())
        vllm_transfer().packed_nccl_broadcast_consumer(
            iterator=iter([(name, (list(t.shape), t.dtype)) for name, t in sent.items()]),
            group=wire, src=0, post_unpack_func=model.load_weights, buffer_size_bytes=BUCKET,
            num_buffers=buffers, device="cpu",
        )  # fmt: skip
    assert all(torch.equal(model.parameters[name], tensor) for name, tensor in sent.items())
    return device.races


def test_a_worker_with_one_buffer_loads_what_has_arrived_and_one_with_two_races():
    assert races_of_receiving(1) == []
    assert races_of_receiving(2) != []  # the reason for PACKED_BUFFERS
