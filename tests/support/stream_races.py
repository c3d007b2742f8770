"""CUDA streams on a CPU: which operation was given to which stream, what waits for what, and what races.

    with simulated_streams() as device:          # torch.cuda's streams, events and waits are its
        ...                                      # any code that works with streams
    device.races                                 # what a GPU could do in the wrong order, in words

Operations run at once and in order, so values are right whatever the code does; whether a GPU would have to
get them right is told by vector clocks. Of memory the caching allocator's rule holds: what is freed is used
again by the stream that it was taken under, at once, but after what streams noted by `record_stream` had been
given until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Device", "Event", "Stream", "simulated_streams"]

Clock = dict[int, int]
"""By stream: how many of its operations are over."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, ticks in other.items():
        clock[stream] = max(ticks, clock.get(stream, 0))


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = dict(clock)


class Stream:
    """A stand-in for torch.cuda.Stream."""

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
    """The uses of one storage."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        """Under which it was taken."""
        self.noted: set[int] = set()
        """Streams that `record_stream` named."""
        self.written: tuple[Stream, int] | None = None
        self.read: dict[int, tuple[Stream, int]] = {}
        """Last reading by each stream."""


class Device:
    """All streams of one GPU, and the memory that operations touched."""

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
