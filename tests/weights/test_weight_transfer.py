"""Weights reach engines exactly, each byte once, in bounded memory; what fails is named and nothing hangs.

The engines here are threads with a toy model, so that many layouts and faults take no time;
tests/engines/test_engine.py does the same with vLLM.
"""

import pickle
import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Empty, Queue
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ibpo.weights.layout.regions import (
    Message,
    Need,
    Region,
    TensorMeta,
    assemble,
    choose_senders,
    intersect,
    messages,
    need_all,
    pack,
    parts_by_tensor,
    plan_buckets,
    whole,
)
from megatron_ibpo.weights.transfer.gloo import GlooReceiver, GlooTransport, Memory, _Outbox, join_group
from megatron_ibpo.weights.transfer.rehearsal import Rehearsal
from megatron_ibpo.weights.transfer.update import update_engines
from megatron_ibpo.weights.transfer.update_order import UpdateOrder
from megatron_ibpo.weights.transfer.wire import (
    Answer,
    checksum,
    compare_checksums,
    part_checksums,
    read_answers,
)
from megatron_ibpo.weights.weight_errors import WeightMismatchError, WeightPlanError
from support.ranks import run_ranks
from support.weight_sources import DividedWeights, cut

# ------------------------------------------------------------------------------- which rank sends what where

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@st.composite
def cut_axis(draw, size):
    """Draw where an axis of `size` is cut: bounds of consecutive intervals that cover it."""
    inner = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True))
    return list(pairwise(sorted({0, size, *(cut for cut in inner if cut < size)})))


@st.composite
def sharded_tensors(draw):
    """(tensors, regions of each, what a receiver needs of each), for three ranks."""
    tensors, regions, needs = [], [], []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        tensor = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        axis = draw(st.integers(0, len(shape) - 1))
        holders = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)
        box = list(whole(shape))
        held = []
        for bounds in draw(cut_axis(shape[axis])):
            box[axis] = bounds
            held.append(Region(tuple(box), draw(holders)))
        wanted = draw(st.integers(0, len(shape) - 1))
        box = list(whole(shape))
        boxes = []
        for bounds in draw(cut_axis(shape[wanted])):
            box[wanted] = bounds
            if draw(st.booleans()):
                boxes.append(tuple(box))
        tensors.append(tensor)
        regions.append(tuple(held))
        needs.append(Need(dtype, tuple(boxes)) if boxes else None)
    return tensors, regions, needs


@settings(max_examples=60)
@given(case=sharded_tensors(), limit=st.integers(1, 200), prefer=st.sampled_from([None, 0, 1, 2]))
def test_every_needed_byte_is_sent_once_and_arrives_in_its_place(case, limit, prefer):
    tensors, regions, needs = case
    metas = [TensorMeta(f"t{n}", t.dtype, tuple(t.shape)) for n, t in enumerate(tensors)]
    held = {
        rank: {
            number: {r.box: cut(tensor, r.box) for r in regions[number] if rank in r.ranks}
            for number, tensor in enumerate(tensors)
        }
        for rank in range(3)
    }
    senders = choose_senders(metas, regions, prefer=prefer)
    parts_sent = 0
    for bucket in plan_buckets(metas, limit):
        assert sum(metas[number].num_bytes for number in bucket) <= limit or len(bucket) == 1
        by_sender = messages(bucket, senders, needs)
        flats = {rank: pack(message, held[rank]) for rank, message in by_sender.items()}
        parts_sent += sum(part.num_bytes for message in by_sender.values() for part in message.parts)
        arrived = parts_by_tensor(bucket, by_sender, flats)
        for number in bucket:
            need = needs[number]
            if need is None:
                assert arrived[number] == []
                continue
            tensor = assemble(metas[number].shape, need, arrived[number], blank=True)
            for box in need.boxes:
                assert torch.equal(cut(tensor, box), cut(tensors[number], box))
    assert parts_sent == sum(need.num_bytes for need in needs if need is not None)


@settings(max_examples=30)
@given(case=sharded_tensors())
def test_holders_share_the_sending_and_a_preferred_rank_sends_all_that_it_holds(case):
    tensors, regions, _ = case
    metas = [TensorMeta(f"t{n}", t.dtype, tuple(t.shape)) for n, t in enumerate(tensors)]
    for chosen, offered in zip(choose_senders(metas, regions, prefer=1), regions, strict=True):
        assert [box for _, box in chosen] == [region.box for region in offered]
        for (rank, _), region in zip(chosen, offered, strict=True):
            assert rank in region.ranks
            assert (rank == 1) == (1 in region.ranks)


def test_replicas_send_half_each():
    metas = [TensorMeta(f"t{n}", torch.bfloat16, (4, 4)) for n in range(10)]
    regions = [(Region(whole((4, 4)), (0, 1)),) for _ in metas]
    ranks = [rank for ((rank, _),) in choose_senders(metas, regions)]
    assert ranks == [0, 1] * 5


def test_boxes_meet_where_both_are():
    assert intersect(((0, 4), (2, 8)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4), (0, 8)), ((4, 8), (0, 8))) is None


# -------------------------------------------------------------------------------- what a loader reads


def needs_of(loader, shape=(8, 6), dtype=torch.float32):
    """Return what `loader(tensor)` reads of a tensor."""
    rehearsal = Rehearsal([TensorMeta("t", dtype, shape)])
    ((_, tensor),) = rehearsal.tensors()
    loader(tensor)
    (need,) = rehearsal.needs()
    return need


def test_a_shard_that_is_copied_is_all_that_is_needed():
    rows = needs_of(lambda t: torch.empty(2, 6).copy_(t.narrow(0, 4, 2)))
    assert rows == Need(torch.float32, (((4, 6), (0, 6)),))
    columns = needs_of(lambda t: torch.empty(8, 3).copy_(t.chunk(2, dim=1)[1]))
    assert columns == Need(torch.float32, (((0, 8), (3, 6)),))
    inner = needs_of(lambda t: torch.empty(2, 2).copy_(t[1:3][:, 4:6]))
    assert inner == Need(torch.float32, (((1, 3), (4, 6)),))


def test_several_shards_are_needed_together_and_twice_the_same_once():
    def loader(t):
        for start in (0, 4, 4):
            torch.empty(2, 6).copy_(t.data[start : start + 2])

    assert needs_of(loader) == Need(torch.float32, (((0, 2), (0, 6)), ((4, 6), (0, 6))))


def test_a_tensor_travels_in_the_precision_it_is_copied_to_if_that_is_the_lower_one():
    assert needs_of(lambda t: torch.empty(8, 6, dtype=torch.bfloat16).copy_(t)).dtype == torch.bfloat16
    up = needs_of(lambda t: torch.empty(8, 6).copy_(t), dtype=torch.bfloat16)
    assert up.dtype == torch.bfloat16
    other = needs_of(lambda t: torch.empty(8, 6, dtype=torch.float16).copy_(t), dtype=torch.bfloat16)
    assert other.dtype == torch.bfloat16  # as many bits, and other values


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


def test_looking_at_shapes_needs_nothing():
    assert needs_of(lambda t: (t.shape, t.size(0), t.dtype, t.dim(), t.device, t[0].numel())) is None


def test_a_view_that_is_no_box_needs_the_rows_that_it_touches():
    need = needs_of(lambda t: torch.empty(6, 2).copy_(t[2:4].t()))
    assert need == Need(torch.float32, (((2, 4), (0, 6)),))


# ------------------------------------------------------------------------------------------ checksums


def test_checksum_by_hand() -> None:
    words = torch.tensor([5, -2], dtype=torch.int32)
    multiplier = 0x9E3779B97F4A7C15
    assert checksum(words) == (6 * multiplier + (-1) * 3 * multiplier) % 2**64


@given(
    values=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40),
    place=st.integers(0, 39),
    flip=st.integers(1, 255),
)
def test_checksum_sees_any_wrong_byte(values: list[int], place: int, flip: int) -> None:
    tensor = torch.tensor(values, dtype=torch.int16)
    wrong = tensor.clone()
    wrong.view(torch.uint8)[place % (2 * len(values))] ^= flip
    assert checksum(wrong) != checksum(tensor)


def test_checksum_sees_values_that_changed_places() -> None:
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))


def test_parts_are_told_apart_by_their_bounds():
    meta = TensorMeta("w", torch.bfloat16, (4, 3))
    tensor = torch.arange(12).to(torch.bfloat16).view(4, 3)
    regions = [(Region(((0, 3), (0, 3)), (0,)), Region(((3, 4), (0, 3)), (1,)))]
    by_sender = messages(range(1), choose_senders([meta], regions), need_all([meta]))
    held = {0: {((0, 3), (0, 3)): tensor[:3], ((3, 4), (0, 3)): tensor[3:]}}
    sums = {}
    for message in by_sender.values():
        sums |= part_checksums(message, pack(message, held), [meta])
    assert sums == {"w[0:3, 0:3]": checksum(tensor[:3]), "w[3:4, 0:3]": checksum(tensor[3:])}


def test_differences_between_sent_and_received_are_named():
    sent = {"a": 1, "b": 2, "c": 3}
    compare_checksums(sent, [{"a": 1, "b": 2}, {"a": 1, "c": 3}])
    with pytest.raises(WeightMismatchError, match=r"1 of 3 tensors .*: b$"):
        compare_checksums(sent, [{"a": 1, "b": 2}, {"b": 9, "c": 3}])
    with pytest.raises(WeightMismatchError, match=r"1 of 3 tensors .*: c$"):
        compare_checksums(sent, [{"a": 1, "b": 2}])


# ------------------------------------------------------------------------------- trainers and toy engines

SHAPES = {
    "rows": (8, 6), "columns": (6, 8), "norm": (5,), "conv": (12, 1, 2), "half": (16, 3), "last": (4, 4),
}  # fmt: skip
BUCKET = 400
"""Bytes: several buckets."""


def weights(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


class ToySource(DividedWeights):
    """A trainer's weights: `norm` on every rank, the rest divided, `columns` by columns."""

    def __init__(self, world: Any, version: int = 0, *, without: str | None = None, extra: str | None = None):
        tensors = weights(version)
        tensors.pop(without, None)
        if extra is not None:
            tensors[extra] = torch.zeros(4)
        super().__init__(tensors, world.rank, world.size, {"norm": None, "columns": 1})


class ToyWorker:
    """One tensor-parallel worker: takes its rows, columns, sections; `half` in bfloat16, `norm` whole."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.parameters: dict[str, torch.Tensor] = {}
        self.receiver: GlooReceiver | None = None
        self.needs: list[Need | None] = []
        self.receipt: dict[str, int] | None = None

    def shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "norm":
            return tensor
        if name == "conv":  # each of three sections
            return torch.cat([part.chunk(self.size)[self.rank] for part in tensor.chunk(3)])
        return tensor.chunk(self.size, 1 if name == "columns" else 0)[self.rank]

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in tensors:
            if name == "conv":
                parts = [part.chunk(self.size)[self.rank] for part in tensor.chunk(3)]
                self.parameters[name] = torch.empty(sum(map(len, parts)), *tensor.shape[1:])
                for place, part in zip(self.parameters[name].chunk(3), parts, strict=True):
                    place.copy_(part)
            elif name in SHAPES:
                shard = self.shard(name, tensor)
                dtype = torch.bfloat16 if name == "half" else torch.float32
                self.parameters[name] = torch.empty(shard.shape, dtype=dtype).copy_(shard)
            else:
                continue
            loaded.add(name)
        return loaded

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        shards = {name: self.shard(name, tensor) for name, tensor in weights(version).items()}
        return shards | {"half": shards["half"].bfloat16()}


class ToyEngine:
    """An engine as its owner holds it: a thread for each worker, and what SamplingEngine answers."""

    def __init__(self, workers: int, *, fault: str | None = None) -> None:
        self.workers = [ToyWorker(rank, workers) for rank in range(workers)]
        self.fault = fault
        self.answers: Queue[Any] = Queue()
        self.version: int | None = 0
        self.asked: list[Any] = []

    def begin(self, method: str, *arguments: Any) -> None:
        self.asked.append((method, *arguments))
        threading.Thread(target=self.run, args=(method, *arguments), daemon=True).start()

    def result(self, timeout: float) -> Any:
        try:
            answer = self.answers.get(timeout=timeout)
        except Empty:
            raise RuntimeError(f"engine: no answer within {timeout:g} seconds") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"engine: {answer}")
        return answer

    def run(self, method: str, *arguments: Any) -> None:
        found: list[Any] = [None] * len(self.workers)

        def work(number: int) -> None:
            try:
                found[number] = getattr(self, method)(self.workers[number], *arguments)
            except Exception as error:
                found[number] = error

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [answer for answer in found if isinstance(answer, Exception)]
        self.answers.put(errors[0] if errors else found)

    def rehearse_weight_update(self, worker: ToyWorker, tensors: bytes) -> bytes:
        rehearsal = Rehearsal(pickle.loads(tensors))
        loaded = worker.load_weights(rehearsal.tensors())
        worker.needs = rehearsal.needs()
        return pickle.dumps(Answer(worker.needs, sorted(SHAPES.keys() - loaded), None))

    def init_weight_transfer(self, worker: ToyWorker, info: dict[str, Any]) -> None:
        rank = info["first_worker"] + worker.rank
        group = join_group(info["address"], info["port"], rank, info["size"])
        worker.receiver = GlooReceiver(group, pickle.loads(info["plan"]), worker.needs, info["timeout"])

    def start_weight_update(self, worker: ToyWorker, check: bool) -> None:
        worker.receipt = {} if check else None
        self.version = None

    def update_weights(self, worker: ToyWorker, info: dict[str, Any]) -> None:
        assert worker.receiver is not None
        if self.fault == "stalls":
            time.sleep(100)
        tensors = worker.receiver.tensors(worker.receipt)
        if self.fault == "dies":
            next(tensors)
            del tensors
            worker.receiver = None  # its group closes, as when the process ends
            raise RuntimeError("killed by signal 9")
        worker.load_weights(tensors)

    def finish_weight_update(self, worker: ToyWorker, version: int) -> dict[str, int]:
        self.version = version
        return worker.receipt or {}

    def missing_weights(self, worker: ToyWorker) -> list[str]:
        return sorted(SHAPES.keys() - worker.parameters.keys())

    def wake(self, worker: ToyWorker, part: str) -> None:
        pass

    def is_exact(self, version: int) -> bool:
        return all(
            torch.equal(worker.parameters[name], tensor)
            for worker in self.workers
            for name, tensor in worker.expected(version).items()
        )


def order(version: int, timeout: float = 20.0) -> UpdateOrder:
    return UpdateOrder(version=version, sleeping=False, check=True, timeout=timeout)


def two_engines_of_two(world: Any) -> dict[str, Any]:
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
    exact.append(
        sent.failures == {} and all(link.is_exact(2) and link.version == 3 for link in links.values())
    )
    return {"exact": exact, "traffic": traffic}


@pytest.mark.world
def test_engines_of_any_size_get_their_shards_exactly_and_each_byte_once():
    results = run_ranks(two_engines_of_two, 2)
    assert all(all(result["exact"]) for result in results)
    tensors = weights(0)
    whole_model = sum(t.nbytes for t in tensors.values()) - tensors["half"].nbytes // 2
    per_engine = whole_model + tensors["norm"].nbytes  # which both workers need
    for passes in zip(*(result["traffic"] for result in results), strict=True):
        assert sum(sent for sent, _ in passes) == 2 * per_engine
        assert {needed for _, needed in passes} == {2 * per_engine}
        assert min(sent for sent, _ in passes) > 0.4 * per_engine * 2  # the ranks share the sending


def asked_of_a_sleeping_engine(world: Any) -> list[Any]:
    engine = ToyEngine(1)
    transport = GlooTransport(world, 1, BUCKET, timeout=20)
    transport.connect(ToySource(world), {0: engine}, [0])
    engine.asked.clear()
    asleep = UpdateOrder(version=5, sleeping=True, check=False, timeout=20)
    assert update_engines(transport, world, ToySource(world), asleep, {0: engine}, [0]).failures == {}
    return engine.asked


@pytest.mark.world
def test_a_sleeping_engine_wakes_its_weights_before_the_update_and_its_cache_after():
    (asked,) = run_ranks(asked_of_a_sleeping_engine, 1)
    assert asked == [
        ("wake", "weights"),
        ("start_weight_update", False),
        ("update_weights", {}),
        ("missing_weights",),
        ("finish_weight_update", 5),
        ("wake", "kv_cache"),
    ]


def with_a_fault(world: Any, fault: str) -> dict[str, Any]:
    """Engine 0 is well, engine 1 is not; then both are asked again, the second anew."""
    engines = {0: ToyEngine(1), 1: ToyEngine(1, fault=fault)} if world.is_rank_0 else {}
    transport = GlooTransport(world, 1, BUCKET, timeout=3)
    transport.connect(ToySource(world), engines, [0, 1])
    began = time.monotonic()
    sent = update_engines(transport, world, ToySource(world, 1), order(1, 3), engines, [0, 1])
    seconds = time.monotonic() - began
    first = (engines[0].is_exact(1), engines[1].version) if engines else None
    if engines:
        engines[1] = ToyEngine(1)
    links = {1: engines[1]} if engines else {}
    again = transport.connect(ToySource(world), links, [1])
    again |= update_engines(transport, world, ToySource(world, 2), order(2), engines, [0, 1]).failures
    return {
        "failures": {engine: str(error) for engine, error in sent.failures.items()},
        "first": first,
        "seconds": seconds,
        "again": again,
        "exact": all(engine.is_exact(2) for engine in engines.values()),
    }


@pytest.fixture(scope="module")
def faults():
    """Return what comes of each fault, by name. They wait for time-outs most of their time: all at once."""
    asked = {
        "dies": (with_a_fault, 2, "dies"),
        "stalls": (with_a_fault, 2, "stalls"),
        "no trainer": (without_a_trainer, 2),
        "does not listen": (to_an_engine_that_does_not_listen, 2),
    }
    with ThreadPoolExecutor(len(asked)) as threads:
        ranks = {name: threads.submit(run_ranks, *arguments) for name, arguments in asked.items()}
    return {name: found.result for name, found in ranks.items()}


@pytest.mark.world
@pytest.mark.parametrize("fault", ["dies", "stalls"])
def test_an_engine_that_fails_in_an_update_takes_no_other_with_it(faults, fault):
    driver, other = faults[fault]()
    assert driver["failures"].keys() == {1}, driver["failures"]
    assert driver["first"] == (True, None)  # engine 0 has the weights; engine 1 has no version
    assert max(driver["seconds"], other["seconds"]) < 30
    assert driver["again"] == other["again"] == {}
    assert driver["exact"]


def without_a_trainer(world: Any) -> list[str]:
    """Rank 1 does not send: what is known of the engine then, from its owner and from itself."""
    engine = ToyEngine(1)
    transport = GlooTransport(world, 1, BUCKET, timeout=1)
    transport.connect(ToySource(world), {0: engine} if world.is_rank_0 else {}, [0])
    if not world.is_rank_0:
        world.barrier()  # its group stays open until then
        return []
    engine.begin("start_weight_update", False)
    engine.result(5)
    said = [str(transport.send(ToySource(world), {0: engine}, [0], check=False).failures[0])]
    if "for recv" not in said[0]:  # it gave up after its owner had
        said.append(str(engine.answers.get(timeout=5)))
    world.barrier()
    return said


@pytest.mark.world
def test_an_engine_does_not_wait_for_ever_for_a_trainer(faults):
    said, _ = faults["no trainer"]()
    assert "Timed out waiting 2000ms for recv" in said[-1]


def with_a_flipped_bit(world: Any) -> str:
    engines = {0: ToyEngine(2)} if world.is_rank_0 else {}
    transport = GlooTransport(world, 2, BUCKET, timeout=20)
    transport.connect(ToySource(world), engines, [0])
    send = _Outbox.send

    def flip_the_first(outbox: _Outbox, bucket: int, flat: torch.Tensor, *rest: Any) -> None:
        if world.rank == 1 and bucket == 0:
            flat[1] ^= 4
        send(outbox, bucket, flat, *rest)

    with mock.patch.object(_Outbox, "send", flip_the_first):
        try:
            update_engines(transport, world, ToySource(world), order(1), engines, [0])
        except WeightMismatchError as error:
            return str(error)
    return "no error"


@pytest.mark.world
def test_a_wrong_bit_is_named_with_its_tensor_and_shard():
    said, other = run_ranks(with_a_flipped_bit, 2)
    assert re.search(r"1 of \d+ tensors .*: rows\[4:8, 0:6\]$", said)  # rank 1 holds what worker 1 takes
    assert other == "no error"


def with_tensors_that_do_not_fit(world: Any) -> list[str]:
    said = []
    for change in ({"without": "norm"}, {"extra": "who"}):
        engines = {0: ToyEngine(2)} if world.is_rank_0 else {}
        try:
            GlooTransport(world, 2, BUCKET, timeout=20).connect(ToySource(world, **change), engines, [0])
            said.append("connected")
        except WeightPlanError as error:
            said.append(str(error))
    return said


@pytest.mark.world
def test_tensors_that_do_not_fit_are_named_on_every_rank_before_anything_is_sent():
    for said in run_ranks(with_tensors_that_do_not_fit, 2):
        assert said == [
            "the trainer's tensors do not cover norm of engine 0",
            "engine 0 has no place for who of the trainer",
        ]


def test_what_a_model_raises_at_unknown_tensors_is_passed_on():
    answer = pickle.dumps(Answer([], [], "KeyError: 'who'"))
    with pytest.raises(WeightPlanError, match="engine 3 cannot load the trainer's tensors: KeyError: 'who'"):
        read_answers(3, [answer], [])


# --------------------------------------------------------------------------------- gathering, and memory


def gathered_everywhere(world: Any) -> list[list[tuple[str, Any]]]:
    from megatron_ibpo.weights.layout.gather import Gather

    source = ToySource(world, 4)
    return [
        [(name, None if tensor is None else tensor.clone()) for name, tensor in gather]
        for gather in (Gather(source, to=to, bucket_bytes=BUCKET, device="cpu") for to in (0, 2, None))
    ]


@pytest.mark.world
def test_tensors_are_gathered_whole_where_they_are_asked_for():
    results = run_ranks(gathered_everywhere, 3)
    for rank, (at_0, at_2, everywhere) in enumerate(results):
        for tensors, here in ((at_0, rank == 0), (at_2, rank == 2), (everywhere, True)):
            assert [name for name, _ in tensors] == list(SHAPES)
            if here:
                assert all(torch.equal(tensor, weights(4)[name]) for name, tensor in tensors)
            else:
                assert all(tensor is None for _, tensor in tensors)


MIB = 1024**2
LARGE_BUCKET = 32 * MIB


def large_source(world: Any) -> DividedWeights:
    """192 MiB in tensors of 2 MiB, divided by rows."""
    tensors = {f"t{number}": torch.ones(1024, 512) for number in range(96)}
    return DividedWeights(tensors, world.rank, world.size)


class Sink(ToyEngine):
    """Wants everything, keeps nothing."""

    def rehearse_weight_update(self, worker: ToyWorker, tensors: bytes) -> bytes:
        worker.needs = need_all(pickle.loads(tensors))
        return pickle.dumps(Answer(worker.needs, [], None))

    def update_weights(self, worker: ToyWorker, info: dict[str, Any]) -> None:
        assert worker.receiver is not None
        if self.fault == "stalls":
            time.sleep(100)
        for _ in worker.receiver.tensors():
            pass


def to_an_engine_that_does_not_listen(world: Any) -> tuple[str, float]:
    links = {0: Sink(1, fault="stalls")} if world.is_rank_0 else {}
    transport = GlooTransport(world, 1, LARGE_BUCKET, timeout=2)
    transport.connect(large_source(world), links, [0])
    began = time.monotonic()
    failures = transport.send(large_source(world), links, [0], check=False).failures
    return str(failures[0]), time.monotonic() - began


@pytest.mark.world
def test_a_trainer_does_not_wait_for_ever_for_an_engine(faults):
    for said, seconds in faults["does not listen"]():
        assert "Timed out waiting" in said or "no answer within 2 seconds" in said
        assert seconds < 15


def memory_in_use(kind: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))


def test_memory_is_used_again_when_the_last_view_of_it_has_gone_and_not_before():
    memory = Memory(step=MIB)
    first = memory.take(8 * MIB)
    place = first.data_ptr()
    view = first[4:12].view(torch.float32)
    del first
    assert memory.take(8 * MIB).data_ptr() != place
    del view
    assert memory.take(7 * MIB + 5).data_ptr() == place
    assert memory.take(3 * MIB).data_ptr() != place  # less than half of it


class Counted:
    """Buffers to receive into, and how many bytes of them exist at once at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def receive_buffer(self, message: Message, device: Any) -> torch.Tensor:
        memory = np.empty(message.num_bytes, dtype=np.uint8)
        self.now += memory.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(memory, self.forget, memory.nbytes)
        return torch.from_numpy(memory)

    def forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


def memory_of_sending_and_gathering(world: Any) -> tuple[int, int]:
    """Return how far memory rises while rank 0 sends to an engine of rank 1, and what it holds while it
    gathers, in bytes."""
    from megatron_ibpo.weights.layout import gather

    source = large_source(world)
    links = {0: Sink(1)} if world.rank == 1 else {}
    transport = GlooTransport(world, 1, LARGE_BUCKET, timeout=60)
    assert transport.connect(source, links, [0]) == {}
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = memory_in_use("VmRSS")
    assert transport.send(source, links, [0], check=False).failures == {}
    rise = memory_in_use("VmHWM") - before

    counted = Counted()
    gather.receive_buffer = counted.receive_buffer
    for _ in gather.Gather(source, to=0, bucket_bytes=LARGE_BUCKET, device="cpu"):
        pass
    return rise, counted.most


@pytest.mark.world
def test_an_update_takes_two_buckets_of_memory_and_no_replica():
    (rise, held), _ = run_ranks(memory_of_sending_and_gathering, 2)
    assert LARGE_BUCKET / 4 < rise < 2 * LARGE_BUCKET
    assert held == LARGE_BUCKET  # the other rank's halves of two buckets
