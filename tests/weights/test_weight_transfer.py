"""The engines here are threads with a toy model; tests/engines/test_engine.py does the same with vLLM."""

import pickle
import threading
import time
import weakref
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.weights import WeightMismatchError, WeightPlanError
from megatron_ibpo.weights.layout import regions
from megatron_ibpo.weights.layout.regions import Need, Region, TensorMeta, choose_senders, full_box
from megatron_ibpo.weights.transfer import wire
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, GlooTransport, Memory, _Outbox, join_group
from megatron_ibpo.weights.transfer.link import UpdateOrder
from megatron_ibpo.weights.transfer.nccl_group import abort, ends_when_lost, is_lost, run_join, say_lost
from megatron_ibpo.weights.transfer.update import update_engines
from megatron_ibpo.weights.transfer.wire import Answer, Rehearsal, checksum
from support.toy_engine import ToyEngine
from support.weight_sources import DividedWeights, cut


@st.composite
def sharded_tensors(draw):
    tensors, held, needs = [], [], []
    holders = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)

    def boxes(shape):
        axis = draw(st.integers(0, len(shape) - 1))
        inner = draw(st.sets(st.integers(1, shape[axis]), max_size=3))
        for bounds in pairwise(sorted({0, shape[axis], *inner})):
            yield (*full_box(shape)[:axis], bounds, *full_box(shape)[axis + 1 :])

    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
        generator = torch.Generator().manual_seed(number)
        tensors.append(torch.randint(-100, 100, shape, generator=generator).to(dtype))
        held.append(tuple(Region(box, draw(holders)) for box in boxes(shape)))
        wanted = tuple(box for box in boxes(shape) if draw(st.booleans()))
        needs.append(Need(dtype, wanted) if wanted else None)
    return tensors, held, needs


@settings(max_examples=60)
@given(case=sharded_tensors(), limit=st.integers(1, 200), prefer=st.sampled_from([None, 0, 1, 2]))
def test_every_needed_byte_is_sent_once_to_its_place(case, limit, prefer):
    tensors, offered, needs = case
    metas = [TensorMeta(f"t{n}", t.dtype, tuple(t.shape)) for n, t in enumerate(tensors)]
    held = {
        rank: {
            number: {r.box: cut(tensor, r.box) for r in offered[number] if rank in r.ranks}
            for number, tensor in enumerate(tensors)
        }
        for rank in range(3)
    }
    senders = choose_senders(metas, offered, prefer=prefer)
    for chosen, of_tensor in zip(senders, offered, strict=True):
        for (rank, box), region in zip(chosen, of_tensor, strict=True):
            assert box == region.box
            assert rank in region.ranks
            assert prefer is None or (rank == prefer) == (prefer in region.ranks)
    parts_sent = 0
    for bucket in regions.plan_buckets(metas, limit):
        assert sum(metas[number].num_bytes for number in bucket) <= limit or len(bucket) == 1
        by_sender = regions.messages(bucket, senders, needs)
        flats = {rank: regions.pack(message, held[rank]) for rank, message in by_sender.items()}
        parts_sent += sum(part.num_bytes for message in by_sender.values() for part in message.parts)
        arrived = regions.parts_by_tensor(bucket, by_sender, flats)
        for number in bucket:
            if needs[number] is None:
                assert arrived[number] == []
                continue
            tensor = regions.assemble(metas[number].shape, needs[number], arrived[number], blank=True)
            for box in needs[number].boxes:
                assert torch.equal(cut(tensor, box), cut(tensors[number], box))
    assert parts_sent == sum(need.num_bytes for need in needs if need is not None)


def test_replicas_send_half_each():
    metas = [TensorMeta(f"t{n}", torch.bfloat16, (4, 4)) for n in range(10)]
    senders = choose_senders(metas, [(Region(full_box((4, 4)), (0, 1)),)] * 10)
    assert [rank for ((rank, _),) in senders] == [0, 1] * 5


def needs_of(loader, dtype=torch.float32):
    rehearsal = Rehearsal([TensorMeta("t", dtype, (8, 6))])
    ((_, tensor),) = rehearsal.tensors()
    loader(tensor)
    (need,) = rehearsal.needs()
    return need


def test_only_needed_slices_are_copied_in_the_lower_precision():
    def load_twice_the_same(t):
        for start in (0, 4, 4):
            torch.empty(2, 6).copy_(t.data[start : start + 2])

    for loader, *boxes in (
        (lambda t: torch.empty(2, 2).copy_(t[1:3][:, 4:6]), ((1, 3), (4, 6))),
        (lambda t: torch.empty(2, 3).copy_(t.narrow(0, 4, 2).chunk(2, dim=1)[1]), ((4, 6), (3, 6))),
        (lambda t: torch.empty(6, 2).copy_(t[2:4].t()), ((2, 4), (0, 6))),  # no box: the rows that it touches
        (load_twice_the_same, ((0, 2), (0, 6)), ((4, 6), (0, 6))),
    ):
        assert needs_of(loader) == Need(torch.float32, tuple(boxes))
    assert needs_of(lambda t: (t.shape, t.size(0), t.dtype, t.dim(), t.device, t[0].numel())) is None
    for sent, kept, travels in (
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.bfloat16),  # as many bits, and other values
    ):
        assert needs_of(torch.empty(8, 6, dtype=kept).copy_, sent).dtype == travels


def test_whatever_looks_at_values_needs_them_in_full_precision():
    for loader in (
        lambda t: torch.cat([t, t]),
        lambda t: t.float() + 1,
        lambda t: t.tolist(),
        lambda t: torch.empty(48).copy_(t.reshape(6, 8).t().reshape(48)),
        lambda t: torch.stack(list(t.unbind(0))),
        lambda t: torch.empty(8, 6).__setitem__(slice(None), t),
    ):
        need, covered = needs_of(loader), torch.zeros(8, 6)
        for box in need.boxes:
            cut(covered, box).fill_(1)
        assert covered.all(), loader
        assert need.dtype == torch.float32, loader


@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2), st.integers(0, 39), st.integers(1, 255))
def test_a_checksum_matches_hand_computation_and_sees_any_wrong_byte(values, place, flip):
    by_hand = (6 - 3) * 0x9E3779B97F4A7C15 % 2**64
    assert checksum(torch.tensor([5, -2], dtype=torch.int32)) == by_hand
    tensor = torch.tensor(values, dtype=torch.int16)
    wrong = tensor.clone()
    wrong.view(torch.uint8)[place % (2 * len(values))] ^= flip
    assert checksum(wrong) != checksum(tensor)
    sent = {"a": 1, "b": 2, "c": 3}
    wire.compare_checksums(sent, [{"a": 1, "b": 2}, {"a": 1, "c": 3}])
    for received, name in (([{"a": 1, "b": 2}, {"b": 9, "c": 3}], "b"), ([{"a": 1, "b": 2}], "c")):
        with pytest.raises(WeightMismatchError, match=rf"1 of 3 tensors .*: {name}$"):
            wire.compare_checksums(sent, received)


SHAPES = {"rows": (8, 6), "columns": (6, 8), "norm": (5,), "conv": (12, 1, 2), "half": (16, 3), "z": (4, 4)}
BUCKET = 400  # bytes: several buckets


def weights(version):
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def source_of(world, version=0, without=None):
    """A trainer's weights: `norm` on every rank, the rest divided, `columns` by columns."""
    tensors = {name: own for name, own in weights(version).items() if name != without}
    return DividedWeights(tensors, world.rank, world.size, {"norm": None, "columns": 1})


class ToyWorker:
    """One tensor-parallel worker: takes its rows, columns, sections; `half` in bfloat16, `norm` whole."""

    receipt = None

    def __init__(self, rank, size, fault=None, names=frozenset(SHAPES)):
        self.rank, self.size, self.fault, self.names, self.parameters = rank, size, fault, names, {}

    def shards(self, name, tensor):
        if name == "norm":
            return [tensor]
        sections = tensor.chunk(3 if name == "conv" else 1)
        return [part.chunk(self.size, int(name == "columns"))[self.rank] for part in sections]

    def load_weights(self, tensors):
        for name, tensor in tensors:
            parts = self.shards(name, tensor)
            dtype = torch.bfloat16 if name == "half" else torch.float32
            own = torch.empty(len(parts) * len(parts[0]), *parts[0].shape[1:], dtype=dtype)
            for place, part in zip(own.chunk(len(parts)), parts, strict=True):
                place.copy_(part)
            self.parameters[name] = own

    def is_exact(self, version):
        shards = {name: torch.cat(self.shards(name, tensor)) for name, tensor in weights(version).items()}
        shards["half"] = shards["half"].bfloat16()
        return all(torch.equal(self.parameters[name], tensor) for name, tensor in shards.items())

    def rehearse_weight_update(self, tensors):
        rehearsal = Rehearsal(pickle.loads(tensors))
        self.load_weights(rehearsal.tensors())
        self.needs = rehearsal.needs()
        return pickle.dumps(Answer(self.needs, self.missing_weights(), None))

    def init_weight_transfer(self, info):
        group = join_group(info["address"], info["port"], info["first_worker"] + self.rank, info["size"])
        self.receiver = GlooReceiver(group, pickle.loads(info["plan"]), self.needs, info["timeout"])

    def start_weight_update(self, check):
        self.receipt, self.version = ({} if check else None), None

    def update_weights(self, info):
        if self.fault == "stalls":
            time.sleep(100)
        tensors = self.receiver.tensors(self.receipt)
        if self.fault == "dies":
            next(tensors)
            del tensors, self.receiver  # its group closes, as when the process ends
            raise RuntimeError("killed by signal 9")
        self.load_weights(tensors)

    def finish_weight_update(self, version):
        self.version = version
        return self.receipt or {}

    def missing_weights(self):
        return sorted(self.names - self.parameters.keys())

    def take_weights(self, check, version):
        self.start_weight_update(check)
        self.update_weights({})
        missing = self.missing_weights()
        return missing, {} if missing else self.finish_weight_update(version)

    def wake(self, part):
        pass


def of_two():
    return ToyEngine(ToyWorker(0, 2), ToyWorker(1, 2))


def update(transport, world, version, engines, several, timeout=20.0, asleep=False):
    order = UpdateOrder(version=version, sleeping=asleep, check=not asleep, timeout=timeout)
    return update_engines(transport, world, source_of(world, version), order, engines, several)


@pytest.mark.world(2)
def test_engines_of_any_size_get_each_shard_byte_once(world):
    engines, tensors = {world.rank: of_two()}, weights(0)
    transport = GlooTransport(world, 2, BUCKET, timeout=20)
    assert transport.connect(source_of(world), engines, [0, 1]) == {}
    whole_model = sum(t.nbytes for t in tensors.values()) - tensors["half"].nbytes // 2
    per_engine = whole_model + tensors["norm"].nbytes  # which both workers need
    for version in (1, 2):
        sent = update(transport, world, version, engines, [0, 1])
        assert sent.failures == {}, version
        assert engines[world.rank].holds(version, version)
        assert sent.needed_bytes == 2 * per_engine, version
        by_rank = world.all_gather(sent.num_bytes)
        assert sum(by_rank) == 2 * per_engine, version
        assert min(by_rank) > 0.4 * per_engine * 2, "the ranks share the sending"


@pytest.mark.world(2)
def test_a_fresh_engine_connects_alone_and_wakes_around_the_update(world):
    links = {1: of_two()} if world.rank == 1 else {}
    transport = GlooTransport(world, 2, BUCKET, timeout=20)
    assert transport.connect(source_of(world), links, [1]) == {}
    for engine in links.values():
        engine.asked.clear()
    assert update(transport, world, 3, links, [1], asleep=True).failures == {}
    for engine in links.values():
        assert engine.holds(3, 3)
        assert engine.asked == [
            ("wake", "weights"),
            ("take_weights", False, 3),
            ("wake", "kv_cache"),
        ]


@pytest.mark.world(2)
@pytest.mark.parametrize("fault", ["dies", pytest.param("stalls", marks=pytest.mark.slow)])
def test_an_engine_failing_in_an_update_spares_the_others(world, fault):
    """Engine 0 is well, engine 1 is not; then both are asked again, the second anew."""
    engines = {n: ToyEngine(ToyWorker(0, 1, fault if n else None)) for n in (0, 1) if world.is_rank_0}
    transport = GlooTransport(world, 1, BUCKET, timeout=3)
    transport.connect(source_of(world), engines, [0, 1])
    began = time.monotonic()
    sent = update(transport, world, 1, engines, [0, 1], timeout=3)
    assert time.monotonic() - began < 30
    if world.is_rank_0:
        assert sent.failures.keys() == {1}
        assert engines[0].holds(1, 1)
        assert engines[1].workers[0].version is None
        engines[1] = ToyEngine(ToyWorker(0, 1))
    links = {1: engines[1]} if engines else {}
    assert transport.connect(source_of(world), links, [1]) == {}
    assert update(transport, world, 2, engines, [0, 1]).failures == {}
    assert all(engine.holds(2, 2) for engine in engines.values())


@pytest.mark.world(2)
def test_trainers_and_engines_never_wait_forever(world):
    """Rank 1 does not send: what is known of the engine then, from its owner and from itself. Then the engine
    does not receive more than sockets hold."""
    engine, source = ToyEngine(ToyWorker(0, 1)), source_of(world)
    transport = GlooTransport(world, 1, BUCKET, timeout=1)
    transport.connect(source, {0: engine} if world.is_rank_0 else {}, [0])
    if world.is_rank_0:
        engine.begin("start_weight_update", False)
        engine.result(5)
        said = str(transport.send(source, {0: engine}, [0], UpdateOrder(0, False, False, 5)).failures[0])
        if "for recv" not in said:  # it gave up after its owner had
            said = str(engine.answers.get(timeout=5))
        assert "Timed out waiting 2000ms for recv" in said
    world.barrier()  # the other rank's group stays open until then
    source, stalled = large_source(world), ToyEngine(ToyWorker(0, 1, "stalls", set()))
    links = {0: stalled} if world.is_rank_0 else {}
    transport = GlooTransport(world, 1, LARGE_BUCKET, timeout=2)
    transport.connect(source, links, [0])
    began = time.monotonic()
    said = str(transport.send(source, links, [0], UpdateOrder(0, False, False, 5)).failures[0])
    assert "Timed out waiting" in said or "no answer within 2 seconds" in said
    assert time.monotonic() - began < 15


LARGE_BUCKET = 32 * 1024**2


def large_source(world):
    """192 MiB in tensors of 2 MiB, divided by rows."""
    return DividedWeights({f"t{n}": torch.ones(1024, 512) for n in range(96)}, world.rank, world.size)


@pytest.mark.world(2)
def test_unfit_tensors_and_flipped_bits_are_named_on_every_rank(world):
    engines, send = {0: of_two()} if world.is_rank_0 else {}, _Outbox.send
    with pytest.raises(WeightPlanError, match="do not cover norm of engine 0"):
        GlooTransport(world, 2, BUCKET, timeout=20).connect(source_of(world, without="norm"), engines, [0])
    with pytest.raises(WeightPlanError, match="engine 3 cannot load the trainer's tensors: KeyError: 'who'"):
        wire.read_answers(3, [pickle.dumps(Answer([], [], "KeyError: 'who'"))], [])
    with pytest.raises(WeightPlanError, match="engine 3 has no place for who of the trainer"):
        wire.read_answers(3, [pickle.dumps(Answer([None], [], None))], [TensorMeta("who", torch.int8, (4,))])

    def flip_the_first(outbox, bucket, flat, *rest):
        if world.rank == 1 and bucket == 0:
            flat[1] ^= 4
        send(outbox, bucket, flat, *rest)

    transport = GlooTransport(world, 2, BUCKET, timeout=20)
    transport.connect(source_of(world), engines, [0])
    wrong = r"1 of \d+ tensors .*: rows\[4:8, 0:6\]$"  # which rank 1 holds, and worker 1
    told = pytest.raises(WeightMismatchError, match=wrong) if world.is_rank_0 else nullcontext()
    with mock.patch.object(_Outbox, "send", flip_the_first), told:
        update(transport, world, 1, engines, [0])


@pytest.mark.world(3)
def test_tensors_are_gathered_whole_where_they_are_asked_for(world):
    for to in (0, 2, None):
        gathered = list(regions.Gather(source_of(world, 4), to=to, bucket_bytes=BUCKET, device="cpu"))
        for name, tensor in gathered:
            assert torch.equal(tensor, weights(4)[name]) if to in (world.rank, None) else tensor is None
        assert [name for name, _ in gathered] == list(SHAPES), to


def test_memory_is_reused_after_its_last_view_is_gone():
    memory = Memory(step=1000)
    first = memory.take(8000)
    place, view = first.data_ptr(), first[4:12].view(torch.float32)
    del first
    assert memory.take(8000).data_ptr() != place
    del view
    assert memory.take(7005).data_ptr() == place
    assert memory.take(3000).data_ptr() != place  # less than half of it


@pytest.mark.world(2)
def test_updates_and_gathering_take_two_buckets_of_memory(world):
    def memory_in_use(kind):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

    source = large_source(world)
    links = {0: ToyEngine(ToyWorker(0, 1, None, set()))} if world.rank == 1 else {}
    transport = GlooTransport(world, 1, LARGE_BUCKET, timeout=60)
    assert transport.connect(source, links, [0]) == {}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present one
    before = memory_in_use("VmRSS")
    assert transport.send(source, links, [0], UpdateOrder(0, False, False, 5)).failures == {}
    if world.is_rank_0:
        assert LARGE_BUCKET / 4 < memory_in_use("VmHWM") - before < 2 * LARGE_BUCKET
    sizes, most = [], [0]  # of a gathering's buffers, since the allocator keeps what was given back

    def receive_buffer(message, device):
        memory = np.empty(message.num_bytes, dtype=np.uint8)
        sizes.append(memory.nbytes)
        most.append(sum(sizes))
        weakref.finalize(memory, sizes.remove, memory.nbytes)
        return torch.from_numpy(memory)

    with mock.patch.object(regions, "receive_buffer", receive_buffer):
        assert sum(1 for _ in regions.Gather(source, to=0, bucket_bytes=LARGE_BUCKET, device="cpu")) == 96
    assert max(most) == LARGE_BUCKET  # rank 1's halves of two buckets, on either side


@pytest.fixture
def group():
    own = SimpleNamespace(device=torch.device("cpu", 0), comm=None, disabled=False, aborted=threading.Event())

    def abort_once(_):
        assert own.disabled, "calls after the abort were open"
        own.aborted.set()

    own.nccl = SimpleNamespace(ncclCommAbort=abort_once)
    return own


@pytest.fixture
def stores(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [store, dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=10))]


@pytest.mark.parametrize("loss", ["another member says so", "rank 0 has gone", "it takes too long"])
def test_a_member_stops_waiting_when_another_is_lost(group, stores, loss):
    with ends_when_lost(stores[1], group, 0.5 if loss == "it takes too long" else 30) as lost:
        if loss == "another member says so":
            say_lost(stores[0])
        if loss == "rank 0 has gone":
            del stores[0]
        assert group.aborted.wait(30)
    assert lost.is_set()


def test_a_finished_group_is_left_alone_and_aborts_once(group, stores):
    with ends_when_lost(stores[1], group, 30) as lost:
        pass
    say_lost(stores[0])  # of the next pass
    assert not lost.is_set()
    assert not group.aborted.is_set()
    abort(group)
    group.nccl = None
    abort(group)


def test_a_failure_to_join_reaches_all_members_at_once(stores):
    def join():
        raise OSError("no socket interface found")

    ours, theirs = stores
    with pytest.raises(OSError, match="no socket interface"):
        run_join(join, 0, theirs, timeout=30)
    assert is_lost(ours)
    assert run_join(threading.Event().wait, 0, ours, timeout=30) is None  # another, that waits for it
