"""Weights that travel between GPUs are read once they are there, and their memory is used again after that.
The streams are a stand-in on a CPU; the gather and vLLM's packed sender and receiver are the real ones."""

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as unwatched

from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.layout import regions
from megatron_ibpo.weights.layout.regions import pack
from megatron_ibpo.weights.transfer.link import UpdateOrder
from megatron_ibpo.weights.transfer.update import open_transport, update_engines
from megatron_ibpo.weights.transfer.wire import checksum
from support import transfer_stand_ins
from support.engine_runs import WORLD
from support.toy_engine import ToyEngine
from support.weight_sources import DividedWeights


class Stream:
    """`over`: the operations, of all streams, that this one's next operation comes after. Events are such."""

    device = torch.device("cpu")

    def __init__(self, of):
        self.of, self.over = of, set()

    def record_event(self):
        return set(self.over)

    def wait_event(self, event):
        self.over |= event

    def wait_stream(self, stream):
        self.over |= stream.over

    def synchronize(self):
        self.of.host |= self.over


class Device(TorchDispatchMode):
    """All streams of one GPU, and the memory that operations touched.

    Operations run at once and in order, so values are right whatever the code does; whether a GPU would have
    to get them right is told by what each waits for. Memory that is freed is used again by the stream under
    which it was taken, at once, but after what streams noted by `record_stream` had been given until then.
    """

    def __init__(self):
        super().__init__()
        self.count, self.host, self.memory, self.races = 0, set(), {}, []
        self.current = Stream(self)

    @contextmanager
    def under(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {key_of(tensor): tensor for tensor in tensors_in(args)}
        written = {
            key_of(tensor): tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
        }
        written |= {key_of(tensor): tensor for tensor in tensors_in(result) if key_of(tensor) not in given}
        if not written:  # it is a view
            return result
        stream, operation = self.current, (self.current, self.count)
        self.count += 1
        stream.over |= self.host | {operation}
        for memory in [self.of(tensor) for key, tensor in given.items() if key not in written]:
            self.check_order(f"{func} reads what is still written", stream, memory.written)
            memory.read.add(operation)
        for memory in map(self.of, written.values()):
            self.check_order(f"{func} writes over what is still used", stream, memory.written | memory.read)
            memory.written, memory.read = {operation}, set()
        return result

    def of(self, tensor):
        """Under which stream a tensor's storage was taken, and which operations wrote and read it last."""
        key = key_of(tensor)
        if key not in self.memory:
            self.memory[key] = SimpleNamespace(stream=self.current, written=set(), read=set(), noted=set())
            weakref.finalize(tensor.untyped_storage(), self.free, key)
        return self.memory[key]

    def free(self, key):
        memory = self.memory.pop(key)
        last = {use for use in memory.written | memory.read if use[0] not in memory.noted}
        self.check_order("memory is used again while still in use", memory.stream, last)

    def check_order(self, what, stream, earlier):
        if not earlier <= stream.over | self.host:
            self.races.append(what)


def key_of(tensor):
    return tensor.untyped_storage()._cdata


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, tuple | list) else []


@pytest.fixture(scope="module")
def packed_tensor():
    from vllm.distributed.weight_transfer import packed_tensor  # five seconds, of one process

    return packed_tensor


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.under)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: device.of(t).noted.add(stream))
    return device


SHAPES = {f"layer{number // 3}.{'abc'[number % 3]}": (4 + number, 8) for number in range(18)}
BUCKET = 1000  # bytes: a few tensors


def halves(rank):
    draw = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return DividedWeights(drawn, rank, 2)


class OtherRank:
    """torch.distributed as the gather of rank 0 sees it: rank 1 sends its halves, on a stream that torch's
    NCCL groups have of their own."""

    isend, irecv, is_initialized = "isend", "irecv", staticmethod(lambda: False)

    def __init__(self, device):
        self.device, self.stream, self.gather = device, Stream(device), None
        self.held = dict(enumerate(halves(1).local()))

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
        self.device, self.coming, self.order, self.sent = device, coming, set(), []

    def broadcast(self, tensor, src):
        self.device.current.wait_event(self.order)  # NCCL keeps the order of one communicator's operations
        if self.coming is None:
            self.sent.append(tensor.clone())
        else:
            arrived, self.coming = self.coming.split([len(tensor), len(self.coming) - len(tensor)])
            tensor.copy_(arrived)
        self.order = self.device.current.record_event()


@pytest.mark.parametrize("own_stream", [True, False])
def test_a_gathering_races_unless_it_has_its_own_stream(device, packed_tensor, monkeypatch, own_stream):
    from megatron_ibpo.engines.vllm import gpu_transports

    source, other = halves(0), OtherRank(device)
    monkeypatch.setattr(regions, "dist", other)
    wire = Wire(device)
    with device:
        other.gather = tensors = regions.Gather(source, to=0, bucket_bytes=BUCKET, device="cpu")
        for tensor in source.tensors.values():
            tensor.mul_(1)
        if own_stream:
            tensors = gpu_transports.on_one_stream(tensors, torch.cuda.Stream())
        packed_tensor.packed_nccl_broadcast_producer(
            iterator=iter(tensors), group=wire, src=0, post_iter_func=lambda item: item[1],
            buffer_size_bytes=BUCKET, num_buffers=2,
        )  # fmt: skip
        for tensor in source.tensors.values():
            tensor.mul_(1)
    expected = torch.cat([tensor.flatten() for tensor in source.tensors.values()])
    assert torch.equal(torch.cat(wire.sent).view(torch.float32), expected)
    assert any("reads what is still written" in race for race in device.races) == (not own_stream)
    assert own_stream == (device.races == [])


def test_a_worker_loads_exactly_the_received_tensors(device, packed_tensor):
    """A model that vLLM reloads layer by layer keeps what comes until a layer is complete, and reads it then
    under whatever stream is the present one: with two buffers it races."""
    from megatron_ibpo.engines.vllm.gpu_transports import PACKED_BUFFERS

    sent = halves(0).tensors
    parameters, kept = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, {}
    coming = torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent.values()])

    def load_weights(weights):
        for name, tensor in weights:
            kept[name] = tensor
            parts = [part for part in kept if part.startswith(name[:-1])]
            if len(parts) == 3:
                for part in parts:
                    fresh = torch.empty(SHAPES[part]).copy_(kept.pop(part))
                    parameters[part].copy_(fresh)

    with device:
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter([(name, (list(t.shape), t.dtype)) for name, t in sent.items()]),
            group=Wire(device, coming), src=0, post_unpack_func=load_weights, buffer_size_bytes=BUCKET,
            num_buffers=PACKED_BUFFERS, device="cpu",
        )  # fmt: skip
    assert all(torch.equal(parameters[name], tensor) for name, tensor in sent.items())
    assert device.races == []


class WholeTensors:
    """A worker that takes whole tensors by our NCCL receiver, of vLLM's, and keeps them."""

    def __init__(self, rank):
        from megatron_ibpo.engines.vllm.receivers import GroupInfo, NCCLWeightTransferUpdateInfo, NcclWorker

        self.group_info, self.update_info = GroupInfo, NCCLWeightTransferUpdateInfo
        self.rank, self.tensors = rank, {}
        parallel = SimpleNamespace(rank=rank, world_size=2, data_parallel_index=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        model = SimpleNamespace(load_weights=self.load_weights)
        self.receiver = NcclWorker(None, config, torch.device("cpu"), model)

    def load_weights(self, weights):
        self.tensors |= {name: tensor.clone() for name, tensor in weights}

    def init_weight_transfer(self, info):
        self.receiver.init_transfer_engine(self.group_info(**info))

    def start_weight_update(self, check):
        pass

    def update_weights(self, info):
        self.receiver.receive_weights(self.update_info(**info))

    def missing_weights(self):
        return sorted(SHAPES.keys() - self.tensors.keys())

    def finish_weight_update(self, version):
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}

    def wake(self, part):
        pass


@pytest.mark.slow
def test_both_workers_of_an_engine_get_whole_tensors(packed_tensor, monkeypatch):
    """The transport, vLLM's packed sender and its receiver are those of GPUs; the wire is gloo."""
    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", transfer_stand_ins.Communicator)
    monkeypatch.setattr(torch.cuda, "Stream", transfer_stand_ins.Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", transfer_stand_ins.Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    options = {"workers_per_engine": 2, "bucket_bytes": 3 * BUCKET, "timeout": 20}
    transport = open_transport(TRANSPORTS["nccl"], WORLD, **options)
    workers = [WholeTensors(0), WholeTensors(1)]
    links = {0: ToyEngine(*workers)}
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    source = DividedWeights(tensors, 0, 1, {})
    transport.connect(source, links, [0])
    for version in (1, 2):  # the second goes to the group of the first
        for number, tensor in enumerate(tensors.values()):
            tensor.fill_(100 * version + number)
        order = UpdateOrder(version=version, sleeping=False, check=True, timeout=20.0)
        sent = update_engines(transport, WORLD, source, order, links, [0])
        assert not sent.failures, version
        for worker in workers:
            assert worker.tensors.keys() == tensors.keys(), f"{version=}"
            assert all(torch.equal(worker.tensors[name], tensor) for name, tensor in tensors.items()), (
                f"{version=}"
            )
