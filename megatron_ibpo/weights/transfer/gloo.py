"""Weights over gloo: the sending trainer ranks and the workers of one engine form a group of their own.

Every rank sends its own part of each tensor straight to the workers that need part of it; nothing is
gathered. An engine that dies takes no other with it.
"""

import mmap
import pickle
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from megatron_ibpo.basics.distributed import World, open_store, own_address
from megatron_ibpo.weights.formats.directories import huge_pages
from megatron_ibpo.weights.layout import regions
from megatron_ibpo.weights.layout.regions import Message, Need, Sender, TensorMeta, WeightSource
from megatron_ibpo.weights.transfer.link import (
    EngineLink,
    Failures,
    Sent,
    UpdateOrder,
    ask,
    collect,
    start,
)
from megatron_ibpo.weights.transfer.wire import WirePlan, part_checksums, read_answers

BUCKETS_UNDERWAY = 2
"""Number of buckets whose messages travel while one more is packed or loaded."""
LARGEST_BUCKET = 16 * 1024**2
"""Bytes of a bucket, whatever memory is allowed: fresh memory costs more than the messages of small buckets.
An update of 0.54 GB on two cores took 1.4 to 1.6 s with buckets of 8 to 32 MiB, 2.0 with 64, 2.8 to 3.9 with
256."""
BLOCKS_IN_A_BUCKET = 8
"""Memory blocks per bucket."""
MOMENT_S = 0.1
"""Seconds that each engine gets at least, even if another one has used up the time."""
MEET_TIMEOUT = timedelta(seconds=60)
"""Time for both sides to meet; both are known to be running then."""
Workers = Sequence[tuple[int, int]]
"""(engine, number of its worker) of each."""
UNUSED = 3
"""References to an unused block: the list's, the loop's and `getrefcount`'s own."""


class Memory:
    """CPU memory for messages: blocks of huge pages, each free when the last tensor in it, or view of one, is
    gone.

    Touching memory for the first time costs as much as receiving into it, so a pass over the weights should
    do that for a few buckets only. With fresh memory for each message a dense model's 0.6 GB left the
    trainer at 0.8 to 1.0 GB/s instead of 1.3 to 1.4 (two turns of tools/bench_weight_update.py on two cores).
    """

    def __init__(self, step: int) -> None:
        """Blocks are multiples of `step` bytes, so that a later message fits in an earlier one's place."""
        self._step = max(1, step)
        self._blocks: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return undefined bytes, uint8 [num_bytes]."""
        size = -(-num_bytes // self._step) * self._step
        free = [block for block in self._blocks if sys.getrefcount(block) == UNUSED]
        fitting = [block for block in free if size <= len(block) <= 2 * size]
        if not fitting:
            # free blocks that do not fit make room
            self._blocks = [block for block in self._blocks if not any(block is unused for unused in free)]
            fitting = [huge_pages(size)]
            self._blocks += fitting
        return torch.frombuffer(fitting[0], dtype=torch.uint8, count=num_bytes)


class GlooTransport:
    """The trainers' side. Methods are collective over all trainer ranks.

    A bucket is at most half of the allowed memory: two travel while a third is packed, at most three halves.
    """

    in_one_call = True

    def __init__(self, world: World, workers_per_engine: int, bucket_bytes: int, timeout: float) -> None:
        self._world = world
        self._workers = workers_per_engine
        self._bucket_bytes = max(1, min(bucket_bytes // 2, LARGEST_BUCKET))
        self._timeout = timeout
        self._groups: dict[int, Any] = {}
        """Group of each engine, on ranks that send."""
        self._needs: dict[int, list[list[Need | None]]] = {}
        """Needs of each worker of each engine."""
        self._metas: list[TensorMeta] = []
        self._senders: list[tuple[Sender, ...]] = []
        self._buckets: list[range] = []
        self._deliveries: list[Mapping[Message, Workers]] = []
        """This rank's messages in each bucket, with the workers that need exactly them."""

    def connect(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]
    ) -> Failures:
        """Learn which parts of the source's tensors `engines` need, plan, and form groups with them. Raises
        WeightPlanError on every rank if tensors and engines do not fit each other."""
        if source.metadata() != self._metas:
            self._needs.clear()
        self._metas = source.metadata()
        self._senders = regions.choose_senders(self._metas, source.regions())
        self._buckets = regions.plan_buckets(self._metas, self._bucket_bytes)
        failures: Failures = {}
        # the engines rehearse an update, and all ranks learn what they need
        metas = pickle.dumps(self._metas)
        replies = ask(links, failures, self._timeout, "rehearse_weight_update", metas)
        for part in self._world.all_gather(replies):
            for engine, answer in part.items():
                self._needs[engine] = read_answers(engine, answer, self._metas)
        failures |= self._meet(links, engines, failures)
        self._deliveries = [self._deliveries_of(bucket) for bucket in self._buckets]
        return failures

    def send(
        self,
        source: WeightSource,
        links: Mapping[int, EngineLink],
        engines: Sequence[int],
        order: UpdateOrder,
    ) -> Sent:
        """Send one pass over `source` to `engines`; the source must be as it was at `connect`."""
        failures = start(links, "take_weights", lambda _: (order.check, order.version))
        groups = {engine: group for engine, group in self._groups.items() if engine in engines}
        outbox = _Outbox(groups, len(self._ranks), self._timeout)
        memory = Memory(self._bucket_bytes // BLOCKS_IN_A_BUCKET)
        local = source.local()
        sums: dict[str, int] = {}
        for number, (bucket, deliveries) in enumerate(zip(self._buckets, self._deliveries, strict=True)):
            bucket_boxes = dict(zip(bucket, islice(local, len(bucket)), strict=True))
            outbox.wait(BUCKETS_UNDERWAY)
            for message, workers in deliveries.items():
                flat = regions.pack(message, bucket_boxes, memory.take(message.num_bytes))
                if order.check:
                    sums |= part_checksums(message, flat, self._metas)
                outbox.send(number, flat, workers)
        outbox.wait(0)
        receipts = collect(links, failures, self._timeout)
        for engine in outbox.failures:
            self._groups.pop(engine, None)
        failures = outbox.failures | failures  # the engine's own error tells more
        needs = (need for engine in engines for worker in self._needs.get(engine, []) for need in worker)
        needed = sum(need.num_bytes for need in needs if need is not None)
        return Sent(failures, outbox.num_bytes, needed, sums, receipts=receipts)

    @property
    def _ranks(self) -> list[int]:
        """Trainer ranks that send; their places in the groups are those in this list."""
        return sorted({rank for senders in self._senders for rank, _ in senders})

    def _meet(self, links: Mapping[int, EngineLink], engines: Sequence[int], absent: Failures) -> Failures:
        """Form the groups of those `engines` that have not failed on any rank."""
        missing = {engine for part in self._world.all_gather(list(absent)) for engine in part}
        present = [engine for engine in engines if engine not in missing]
        host = self._world.on_rank_0(own_address)
        listening = present if self._world.is_rank_0 else []
        stores = {engine: open_store(host, 0, MEET_TIMEOUT) for engine in listening}
        ports = self._world.on_rank_0(lambda: {engine: store.port for engine, store in stores.items()})
        place = {rank: number for number, rank in enumerate(self._ranks)}
        size = len(place) + self._workers
        senders = [tuple((place[rank], box) for rank, box in tensor) for tensor in self._senders]
        info = {
            "address": host,
            "first_worker": len(place),
            "size": size,
            "timeout": 2 * self._timeout,  # the trainers may be waiting for another engine
            "plan": pickle.dumps(WirePlan(self._metas, senders, self._bucket_bytes)),
        }
        met = {engine: link for engine, link in links.items() if engine in present}
        failures = start(met, "init_weight_transfer", lambda engine: (info | {"port": ports[engine]},))
        unmet: Failures = {}
        if self._world.rank in place:
            for engine in present:
                try:
                    store = stores.get(engine) or _store_at(host, ports[engine])
                    self._groups[engine] = open_group(store, place[self._world.rank], size)
                except RuntimeError as error:
                    unmet[engine] = error
        collect(met, failures, self._timeout)
        return unmet | failures

    def _deliveries_of(self, bucket: range) -> Mapping[Message, Workers]:
        """Return this rank's messages in `bucket`; workers that need the same share a message."""
        workers: dict[Message, list[tuple[int, int]]] = {}
        for engine in self._needs:
            for number, needs in enumerate(self._needs[engine]):
                message = regions.messages(bucket, self._senders, needs).get(self._world.rank)
                if message is not None:
                    workers.setdefault(message, []).append((engine, number))
        return workers


class _Outbox:
    """Messages in progress."""

    def __init__(self, groups: dict[int, Any], first_worker: int, timeout: float) -> None:
        self._groups = groups
        self._first_worker = first_worker
        self._timeout = timeout
        self._underway: deque[tuple[int, list[tuple[int, Any]]]] = deque()
        """(bucket, works by engine) of each message; a work holds the tensor it sends"""
        self.failures: Failures = {}
        self.num_bytes = 0

    def send(self, bucket: int, flat: torch.Tensor, workers: Workers) -> None:
        """Start sending `flat` to those of the workers' engines that have not failed."""
        works = []
        for engine, worker in workers:
            if engine not in self._groups or engine in self.failures:
                continue
            try:
                works.append((engine, self._groups[engine].send([flat], self._first_worker + worker, bucket)))
                self.num_bytes += flat.nbytes
            except RuntimeError as error:
                self.failures[engine] = error
        self._underway.append((bucket, works))

    def wait(self, buckets: int) -> None:
        """Wait until at most `buckets` buckets have messages under way; engines that do not take theirs in
        time fail."""
        deadline = time.monotonic() + self._timeout
        while self._underway and len({bucket for bucket, *_ in self._underway}) > buckets:
            _, works = self._underway.popleft()
            for engine, work in works:
                if engine not in self.failures:
                    try:
                        work.wait(timedelta(seconds=max(MOMENT_S, deadline - time.monotonic())))
                    except RuntimeError as error:
                        self.failures[engine] = error


def open_group(store: Any, rank: int, size: int) -> Any:
    """Open a gloo group, beside any other that the process has; its members meet in `store`. Raises
    RuntimeError if the others did not come in time."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address())]
    options._timeout = MEET_TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def join_group(host: str, port: int, rank: int, size: int) -> Any:
    """Join, from a worker, the group of the trainers' rank 0 by `open_group`."""
    return open_group(_store_at(host, port), rank, size)


def _store_at(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, timeout=MEET_TIMEOUT)


class GlooReceiver:
    """A worker's side: receives the parts of the trainers' tensors that are in its `needs`."""

    def __init__(self, group: Any, plan: WirePlan, needs: Sequence[Need | None], timeout: float) -> None:
        """
        Args:
            group: from `join_group`; its first members are the plan's senders.
            timeout: seconds to wait for a bucket.
        """
        self._group = group
        self._metas = plan.metas
        self._bucket_bytes = plan.bucket_bytes
        self._needs = needs
        self._timeout = timedelta(seconds=timeout)
        buckets = regions.plan_buckets(plan.metas, plan.bucket_bytes)
        self._buckets = [(bucket, regions.messages(bucket, plan.senders, needs)) for bucket in buckets]

    def tensors(self, receipt: dict[str, int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one pass, in the plan's order. In a tensor that is needed in part, the rest is
        undefined.

        Args:
            receipt: gets the checksum of every part that arrives; undefined parts are then NaN.

        Raises:
            RuntimeError: a trainer has gone, or sent nothing in time.
        """
        memory = Memory(self._bucket_bytes // BLOCKS_IN_A_BUCKET)
        coming = (self._post(place, memory) for place in range(len(self._buckets)))
        underway = deque(islice(coming, BUCKETS_UNDERWAY))
        for place in range(len(self._buckets)):
            flats = self._arrived(underway.popleft())
            underway.extend(islice(coming, 1))
            yield from self._unpacked(place, flats, receipt)

    def _arrived(self, posted: dict[int, tuple[torch.Tensor, Any]]) -> dict[int, torch.Tensor]:
        """Return the messages of a bucket by sender, once all have arrived."""
        for _, work in posted.values():
            work.wait(self._timeout)
        return {sender: flat for sender, (flat, _) in posted.items()}

    def _unpacked(
        self, place: int, flats: dict[int, torch.Tensor], receipt: dict[str, int] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a bucket; they take over the memory of `flats`."""
        bucket, by_sender = self._buckets[place]
        if receipt is not None:
            for sender, flat in flats.items():
                receipt |= part_checksums(by_sender[sender], flat, self._metas)
        parts = regions.parts_by_tensor(bucket, by_sender, flats)
        flats.clear()
        for number in bucket:
            need, meta = self._needs[number], self._metas[number]
            if need is not None:
                yield (
                    meta.name,
                    regions.assemble(meta.shape, need, parts.pop(number), blank=receipt is not None),
                )

    def _post(self, place: int, memory: Memory) -> dict[int, tuple[torch.Tensor, Any]]:
        """Start receiving the messages of a bucket: (buffer, work) by sender."""
        posted = {}
        for sender, message in self._buckets[place][1].items():
            flat = memory.take(message.num_bytes)
            posted[sender] = (flat, self._group.recv([flat], sender, place))
        return posted
