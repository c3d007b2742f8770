"""The engines here are threads with a toy model; tests/engines/test_engine.py does the same with vLLM."""

import pickle
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Empty, Queue
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.weights.layout import gather, regions
from megatron_ibpo.weights.layout.regions import Need, Region, TensorMeta, choose_senders, need_all, whole
from megatron_ibpo.weights.transfer import wire
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, GlooTransport, Memory, _Outbox, join_group
from megatron_ibpo.weights.transfer.rehearsal import Rehearsal
from megatron_ibpo.weights.transfer.update import update_engines
from megatron_ibpo.weights.transfer.update_order import UpdateOrder
from megatron_ibpo.weights.transfer.wire import Answer, checksum
from megatron_ibpo.weights.weight_errors import WeightMismatchError, WeightPlanError
from support.ranks import run_ranks
from support.weight_sources import DividedWeights, cut


@st.composite
def sharded_tensors(draw):
    """(tensors, regions of each, what a receiver needs of each), for three ranks."""
    tensors, held, needs = [], [], []
    holders = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)

    def boxes(shape):
        """The shape, cut along one axis."""
        axis = draw(st.integers(0, len(shape) - 1))
        size = shape[axis]
        inner = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True))
        for bounds in pairwise(sorted({0, size, *(place for place in inner if place < size)})):
            yield (*whole(shape)[:axis], bounds, *whole(shape)[axis + 1 :])

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
def test_every_needed_byte_is_sent_once_by_a_holder_and_arrives_in_its_place(case, limit, prefer):
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
            need = needs[number]
            if need is None:
                assert arrived[number] == []
                continue
            tensor = regions.assemble(metas[number].shape, need, arrived[number], blank=True)
            for box in need.boxes:
                assert torch.equal(cut(tensor, box), cut(tensors[number], box))
    assert parts_sent == sum(need.num_bytes for need in needs if need is not None)


def test_replicas_send_half_each():
    metas = [TensorMeta(f"t{n}", torch.bfloat16, (4, 4)) for n in range(10)]
    senders = choose_senders(metas, [(Region(whole((4, 4)), (0, 1)),)] * 10)
    assert [rank for ((rank, _),) in senders] == [0, 1] * 5


def needs_of(loader, dtype=torch.float32):
    """Return what `loader(tensor)` reads of a tensor of 8 by 6."""
    rehearsal = Rehearsal([TensorMeta("t", dtype, (8, 6))])
    ((_, tensor),) = rehearsal.tensors()
    loader(tensor)
    (need,) = rehearsal.needs()
    return need


def test_what_is_copied_is_all_that_is_needed():
    def load_twice_the_same(t):
        for start in (0, 4, 4):
            torch.empty(2, 6).copy_(t.data[start : start + 2])

    for loader, *boxes in (
        (lambda t: torch.empty(2, 6).copy_(t.narrow(0, 4, 2)), ((4, 6), (0, 6))),
        (lambda t: torch.empty(8, 3).copy_(t.chunk(2, dim=1)[1]), ((0, 8), (3, 6))),
        (lambda t: torch.empty(2, 2).copy_(t[1:3][:, 4:6]), ((1, 3), (4, 6))),
        (lambda t: torch.empty(6, 2).copy_(t[2:4].t()), ((2, 4), (0, 6))),  # no box: the rows that it touches
        (load_twice_the_same, ((0, 2), (0, 6)), ((4, 6), (0, 6))),
    ):
        assert needs_of(loader) == Need(torch.float32, tuple(boxes))
    assert needs_of(lambda t: (t.shape, t.size(0), t.dtype, t.dim(), t.device, t[0].numel())) is None


@pytest.mark.parametrize(
    ("sent", "kept", "travels"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.bfloat16),  # as many bits, and other values
    ],
)
def test_a_tensor_travels_in_the_precision_it_is_copied_to_if_that_is_the_lower_one(sent, kept, travels):
    assert needs_of(lambda t: torch.empty(8, 6, dtype=kept).copy_(t), sent).dtype == travels


@pytest.mark.parametrize(
    "loader",
    [
        lambda t: torch.cat([t, t]),
        lambda t: t.float() + 1,
        lambda t: t.tolist(),
        lambda t: torch.empty(48, dtype=torch.float32).copy_(t.reshape(6, 8).t().reshape(48)),
        lambda t: torch.stack(list(t.unbind(0))),
        lambda t: torch.empty(8, 6).__setitem__(slice(None), t),
    ],
)
def test_whatever_looks_at_values_needs_them_in_full_precision(loader):
    need = needs_of(loader)
    covered = torch.zeros(8, 6)
    for box in need.boxes:
        cut(covered, box).fill_(1)
    assert covered.all()
    assert need.dtype == torch.float32


@given(
    values=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40),
    place=st.integers(0, 39),
    flip=st.integers(1, 255),
)
def test_a_checksum_is_the_one_worked_by_hand_and_sees_any_wrong_byte(values, place, flip):
    multiplier = 0x9E3779B97F4A7C15
    by_hand = (6 * multiplier + (-1) * 3 * multiplier) % 2**64
    assert checksum(torch.tensor([5, -2], dtype=torch.int32)) == by_hand
    tensor = torch.tensor(values, dtype=torch.int16)
    wrong = tensor.clone()
    wrong.view(torch.uint8)[place % (2 * len(values))] ^= flip
    assert checksum(wrong) != checksum(tensor)


def test_parts_are_told_apart_by_their_bounds():
    meta = TensorMeta("w", torch.bfloat16, (4, 3))
    tensor = torch.arange(12).to(torch.bfloat16).view(4, 3)
    upper, lower = ((0, 3), (0, 3)), ((3, 4), (0, 3))
    senders = choose_senders([meta], [(Region(upper, (0,)), Region(lower, (1,)))])
    sums = {}
    for message in regions.messages(range(1), senders, need_all([meta])).values():
        flat = regions.pack(message, {0: {upper: tensor[:3], lower: tensor[3:]}})
        sums |= wire.part_checksums(message, flat, [meta])
    assert sums == {"w[0:3, 0:3]": checksum(tensor[:3]), "w[3:4, 0:3]": checksum(tensor[3:])}


def test_differences_between_sent_and_received_are_named():
    sent = {"a": 1, "b": 2, "c": 3}
    wire.compare_checksums(sent, [{"a": 1, "b": 2}, {"a": 1, "c": 3}])
    for received, name in (([{"a": 1, "b": 2}, {"b": 9, "c": 3}], "b"), ([{"a": 1, "b": 2}], "c")):
        with pytest.raises(WeightMismatchError, match=rf"1 of 3 tensors .*: {name}$"):
            wire.compare_checksums(sent, received)


SHAPES = {
    "rows": (8, 6), "columns": (6, 8), "norm": (5,), "conv": (12, 1, 2), "half": (16, 3), "last": (4, 4),
}  # fmt: skip
BUCKET = 400
"""Bytes: several buckets."""


def weights(version):
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


class ToySource(DividedWeights):
    """A trainer's weights: `norm` on every rank, the rest divided, `columns` by columns."""

    def __init__(self, world, version=0, *, without=None, **extra):
        tensors = {name: own for name, own in (weights(version) | extra).items() if name != without}
        super().__init__(tensors, world.rank, world.size, {"norm": None, "columns": 1})


class ToyWorker:
    """One tensor-parallel worker: takes its rows, columns, sections; `half` in bfloat16, `norm` whole."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.parameters, self.needs, self.receiver, self.receipt = {}, [], None, None

    def shards(self, name, tensor):
        if name == "norm":
            return [tensor]
        sections = tensor.chunk(3 if name == "conv" else 1)
        return [part.chunk(self.size, int(name == "columns"))[self.rank] for part in sections]

    def load_weights(self, tensors):
        loaded = set()
        for name, tensor in tensors:
            if name in SHAPES:
                parts = self.shards(name, tensor)
                dtype = torch.bfloat16 if name == "half" else torch.float32
                own = torch.empty(len(parts) * len(parts[0]), *parts[0].shape[1:], dtype=dtype)
                for place, part in zip(own.chunk(len(parts)), parts, strict=True):
                    place.copy_(part)
                self.parameters[name] = own
                loaded.add(name)
        return loaded

    def is_exact(self, version):
        shards = {name: torch.cat(self.shards(name, tensor)) for name, tensor in weights(version).items()}
        shards["half"] = shards["half"].bfloat16()
        return all(torch.equal(self.parameters[name], tensor) for name, tensor in shards.items())


class ToyEngine:
    """An engine as its owner holds it: a thread for each worker, and what SamplingEngine answers."""

    def __init__(self, workers, *, fault=None):
        self.workers = [ToyWorker(rank, workers) for rank in range(workers)]
        self.fault, self.version, self.asked, self.answers = fault, 0, [], Queue()

    def begin(self, method, *arguments):
        self.asked.append((method, *arguments))
        for worker in self.workers:
            threading.Thread(target=self.run, args=(worker, method, arguments), daemon=True).start()

    def run(self, worker, method, arguments):
        try:
            answer = getattr(self, method)(worker, *arguments)
        except Exception as error:
            answer = error
        self.answers.put((worker.rank, answer))

    def result(self, timeout):
        try:
            answers = dict(self.answers.get(timeout=timeout) for _ in self.workers)
        except Empty:
            raise RuntimeError(f"engine: no answer within {timeout:g} seconds") from None
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise RuntimeError(f"engine: {answer}")
        return [answers[worker.rank] for worker in self.workers]

    def rehearse_weight_update(self, worker, tensors):
        rehearsal = Rehearsal(pickle.loads(tensors))
        loaded = worker.load_weights(rehearsal.tensors())
        worker.needs = rehearsal.needs()
        return pickle.dumps(Answer(worker.needs, sorted(SHAPES.keys() - loaded), None))

    def init_weight_transfer(self, worker, info):
        rank = info["first_worker"] + worker.rank
        group = join_group(info["address"], info["port"], rank, info["size"])
        worker.receiver = GlooReceiver(group, pickle.loads(info["plan"]), worker.needs, info["timeout"])

    def start_weight_update(self, worker, check):
        worker.receipt, self.version = ({} if check else None), None

    def update_weights(self, worker, info):
        if self.fault == "stalls":
            time.sleep(100)
        tensors = worker.receiver.tensors(worker.receipt)
        if self.fault == "dies":
            next(tensors)
            del tensors
            worker.receiver = None  # its group closes, as when the process ends
            raise RuntimeError("killed by signal 9")
        worker.load_weights(tensors)

    def finish_weight_update(self, worker, version):
        self.version = version
        return worker.receipt or {}

    def missing_weights(self, worker):
        return sorted(SHAPES.keys() - worker.parameters.keys())

    def wake(self, worker, part):
        pass

    def is_exact(self, version):
        return all(worker.is_exact(version) for worker in self.workers)


def order(version, timeout=20.0, *, asleep=False):
    return UpdateOrder(version=version, sleeping=asleep, check=not asleep, timeout=timeout)


def two_engines_of_two(world):
    """Engine r is owned by rank r; two versions, then a fresh engine 1 that is met alone."""
    engines = {world.rank: ToyEngine(2)}
    transport = GlooTransport(world, 2, BUCKET, timeout=20)
    assert transport.connect(ToySource(world), engines, [0, 1]) == {}
    exact, traffic = [], []
    for version in (1, 2):
        sent = update_engines(transport, world, ToySource(world, version), order(version), engines, [0, 1])
        exact.append(sent.failures == {} and engines[world.rank].is_exact(version))
        traffic.append((sent.num_bytes, sent.needed_bytes))
    links = {1: ToyEngine(2)} if world.rank == 1 else {}
    source = ToySource(world, 2)
    assert transport.connect(source, links, [1]) == {}
    sent = update_engines(transport, world, source, order(3), links, [1])
    assert sent.failures == {}
    exact += [link.is_exact(2) and link.version == 3 for link in links.values()]
    return exact, traffic


@pytest.mark.world
def test_engines_of_any_size_get_their_shards_exactly_and_each_byte_once():
    exact, traffic = zip(*run_ranks(two_engines_of_two, 2), strict=True)
    assert exact == ([True] * 2, [True] * 3)
    tensors = weights(0)
    whole_model = sum(t.nbytes for t in tensors.values()) - tensors["half"].nbytes // 2
    per_engine = whole_model + tensors["norm"].nbytes  # which both workers need
    for passes in zip(*traffic, strict=True):
        assert sum(sent for sent, _ in passes) == 2 * per_engine
        assert {needed for _, needed in passes} == {2 * per_engine}
        assert min(sent for sent, _ in passes) > 0.4 * per_engine * 2  # the ranks share the sending


def asked_of_a_sleeping_engine(world):
    engine = ToyEngine(1)
    transport = GlooTransport(world, 1, BUCKET, timeout=20)
    transport.connect(ToySource(world), {0: engine}, [0])
    engine.asked.clear()
    sent = update_engines(transport, world, ToySource(world), order(5, asleep=True), {0: engine}, [0])
    assert sent.failures == {}
    return engine.asked


@pytest.mark.world
def test_a_sleeping_engine_wakes_its_weights_before_the_update_and_its_cache_after():
    (asked,) = run_ranks(asked_of_a_sleeping_engine, 1)
    assert asked == [
        ("wake", "weights"), ("start_weight_update", False), ("update_weights", {}), ("missing_weights",),
        ("finish_weight_update", 5), ("wake", "kv_cache"),
    ]  # fmt: skip


def with_a_fault(world, fault):
    """Engine 0 is well, engine 1 is not; then both are asked again, the second anew. Return failures, how
    engine 0 and 1 are, seconds; failures and whether both are exact afterwards."""
    engines = {0: ToyEngine(1), 1: ToyEngine(1, fault=fault)} if world.is_rank_0 else {}
    transport = GlooTransport(world, 1, BUCKET, timeout=3)
    transport.connect(ToySource(world), engines, [0, 1])
    began = time.monotonic()
    sent = update_engines(transport, world, ToySource(world, 1), order(1, 3), engines, [0, 1])
    seconds = time.monotonic() - began
    first = (engines[0].is_exact(1), engines[1].version) if engines else None
    links = {1: ToyEngine(1)} if engines else {}
    engines |= links
    again = transport.connect(ToySource(world), links, [1])
    again |= update_engines(transport, world, ToySource(world, 2), order(2), engines, [0, 1]).failures
    return [*sent.failures], first, seconds, again, all(engine.is_exact(2) for engine in engines.values())


def without_a_trainer(world):
    """Rank 1 does not send: what is known of the engine then, from its owner and from itself."""
    engine = ToyEngine(1)
    transport = GlooTransport(world, 1, BUCKET, timeout=1)
    transport.connect(ToySource(world), {0: engine} if world.is_rank_0 else {}, [0])
    said = []
    if world.is_rank_0:
        engine.begin("start_weight_update", False)
        engine.result(5)
        said = [str(transport.send(ToySource(world), {0: engine}, [0], check=False).failures[0])]
        if "for recv" not in said[0]:  # it gave up after its owner had
            said.append(str(engine.answers.get(timeout=5)))
    world.barrier()  # the other rank's group stays open until then
    return said


LARGE_BUCKET = 32 * 1024**2


def large_source(world):
    """192 MiB in tensors of 2 MiB, divided by rows."""
    tensors = {f"t{number}": torch.ones(1024, 512) for number in range(96)}
    return DividedWeights(tensors, world.rank, world.size)


class Sink(ToyEngine):
    """Wants everything, keeps nothing."""

    def rehearse_weight_update(self, worker, tensors):
        worker.needs = need_all(pickle.loads(tensors))
        return pickle.dumps(Answer(worker.needs, [], None))

    def update_weights(self, worker, info):
        if self.fault == "stalls":
            time.sleep(100)
        for _ in worker.receiver.tensors():
            pass


def to_an_engine_that_does_not_listen(world):
    links = {0: Sink(1, fault="stalls")} if world.is_rank_0 else {}
    transport = GlooTransport(world, 1, LARGE_BUCKET, timeout=2)
    transport.connect(large_source(world), links, [0])
    began = time.monotonic()
    failures = transport.send(large_source(world), links, [0], check=False).failures
    return str(failures[0]), time.monotonic() - began


@pytest.mark.world
def test_who_fails_or_does_not_listen_takes_nobody_with_it_and_nobody_waits_for_ever():
    """They wait for time-outs most of their time: all at once."""
    asked = [(with_a_fault, 2, "dies"), (with_a_fault, 2, "stalls")]
    asked += [(without_a_trainer, 2), (to_an_engine_that_does_not_listen, 2)]
    with ThreadPoolExecutor(len(asked)) as threads:
        *faults, (said, _), unheard = threads.map(lambda arguments: run_ranks(*arguments), asked)
    for driver, other in faults:
        failed, first, _, _, exact = driver
        assert failed == [1]
        assert first == (True, None)  # engine 0 has the weights; engine 1 has no version
        assert exact
        for _, _, seconds, failures_afterwards, _ in (driver, other):
            assert seconds < 30
            assert failures_afterwards == {}
    assert "Timed out waiting 2000ms for recv" in said[-1]
    for message, seconds in unheard:
        assert "Timed out waiting" in message or "no answer within 2 seconds" in message
        assert seconds < 15


def refused_updates(world):
    """What is said of tensors that do not fit, and of a bit that flips on rank 1."""

    def said(source, update):
        engines = {0: ToyEngine(2)} if world.is_rank_0 else {}
        transport = GlooTransport(world, 2, BUCKET, timeout=20)
        try:
            transport.connect(source, engines, [0])
            update_engines(transport, world, source, order(1), engines, [0]) if update else None
            return "no error"
        except (WeightPlanError, WeightMismatchError) as error:
            return str(error)

    send = _Outbox.send

    def flip_the_first(outbox, bucket, flat, *rest):
        if world.rank == 1 and bucket == 0:
            flat[1] ^= 4
        send(outbox, bucket, flat, *rest)

    lacking, unknown = ToySource(world, without="norm"), ToySource(world, who=torch.zeros(4))
    with mock.patch.object(_Outbox, "send", flip_the_first):
        return said(lacking, False), said(unknown, False), said(ToySource(world), True)


@pytest.mark.world
def test_tensors_that_do_not_fit_are_named_on_every_rank_and_a_wrong_bit_with_its_shard():
    first, second = run_ranks(refused_updates, 2)
    assert (
        first[:2]
        == second[:2]
        == (
            "the trainer's tensors do not cover norm of engine 0",
            "engine 0 has no place for who of the trainer",
        )
    )
    assert re.search(r"1 of \d+ tensors .*: rows\[4:8, 0:6\]$", first[2])  # which rank 1 holds, and worker 1
    assert second[2] == "no error"


def test_what_a_model_raises_at_unknown_tensors_is_passed_on():
    answer = pickle.dumps(Answer([], [], "KeyError: 'who'"))
    with pytest.raises(WeightPlanError, match="engine 3 cannot load the trainer's tensors: KeyError: 'who'"):
        wire.read_answers(3, [answer], [])


def gathered_everywhere(world):
    source = ToySource(world, 4)
    return [
        [(name, None if tensor is None else tensor.clone()) for name, tensor in gathered]
        for gathered in (
            gather.Gather(source, to=to, bucket_bytes=BUCKET, device="cpu") for to in (0, 2, None)
        )
    ]


@pytest.mark.world
def test_tensors_are_gathered_whole_where_they_are_asked_for():
    for rank, (at_0, at_2, everywhere) in enumerate(run_ranks(gathered_everywhere, 3)):
        for tensors, here in ((at_0, rank == 0), (at_2, rank == 2), (everywhere, True)):
            assert [name for name, _ in tensors] == list(SHAPES)
            for name, tensor in tensors:
                assert torch.equal(tensor, weights(4)[name]) if here else tensor is None


def test_memory_is_used_again_when_the_last_view_of_it_has_gone_and_not_before():
    mib = 1024**2
    memory = Memory(step=mib)
    first = memory.take(8 * mib)
    place = first.data_ptr()
    view = first[4:12].view(torch.float32)
    del first
    assert memory.take(8 * mib).data_ptr() != place
    del view
    assert memory.take(7 * mib + 5).data_ptr() == place
    assert memory.take(3 * mib).data_ptr() != place  # less than half of it


def memory_of_sending_and_gathering(world):
    """Return how far memory rises while rank 0 sends to an engine of rank 1, and the most that buffers hold
    while it gathers, in bytes."""

    def memory_in_use(kind):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))

    source = large_source(world)
    links = {0: Sink(1)} if world.rank == 1 else {}
    transport = GlooTransport(world, 1, LARGE_BUCKET, timeout=60)
    assert transport.connect(source, links, [0]) == {}
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = memory_in_use("VmRSS")
    assert transport.send(source, links, [0], check=False).failures == {}
    rise = memory_in_use("VmHWM") - before
    sizes, most = [], 0

    def receive_buffer(message, device):
        nonlocal most
        memory = np.empty(message.num_bytes, dtype=np.uint8)
        sizes.append(memory.nbytes)
        most = max(most, sum(sizes))
        weakref.finalize(memory, sizes.remove, memory.nbytes)
        return torch.from_numpy(memory)

    gather.receive_buffer = receive_buffer
    for _ in gather.Gather(source, to=0, bucket_bytes=LARGE_BUCKET, device="cpu"):
        pass
    return rise, most


@pytest.mark.world
def test_an_update_takes_two_buckets_of_memory_and_no_replica():
    (rise, held), _ = run_ranks(memory_of_sending_and_gathering, 2)
    assert LARGE_BUCKET / 4 < rise < 2 * LARGE_BUCKET
    assert held == LARGE_BUCKET  # the other rank's halves of two buckets
