"""The protocol of transports, and one weight update of running engines, the same over all transports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Protocol, cast

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.weights import WeightPlanError, listed
from megatron_ibpo.weights.layout.regions import WeightSource
from megatron_ibpo.weights.transfer.link import EngineLink, Failures, Sent, UpdateOrder, ask, without
from megatron_ibpo.weights.transfer.wire import compare_checksums


class Transport(Protocol):
    """A carrier of tensors from the trainers to engines. Methods are collective over all trainer ranks."""

    in_one_call: bool
    """True if `send` has engines take the whole update (`WeightReceiver.take_weights`), so that it leaves
    nothing to start and to finish."""

    def connect(
        self, source: WeightSource, links: Mapping[int, EngineLink], engines: Sequence[int]
    ) -> Failures:
        """Plan the update of `engines`, which are new; `links` are those of them that this rank owns. Raises
        WeightPlanError on every rank if the source's tensors are not those that the engines load."""

    def send(
        self,
        source: WeightSource,
        links: Mapping[int, EngineLink],
        engines: Sequence[int],
        order: UpdateOrder,
    ) -> Sent:
        """Send one pass over `source` to `engines`, which wait for it and are the same on every rank."""


def open_transport(
    path: str, world: World, *, workers_per_engine: int, bucket_bytes: int, timeout: float
) -> Transport:
    """Return the trainers' side of a transport, not yet connected.

    Args:
        path: import path of its class, module:Class (`engines.registry.TRANSPORTS`).
        bucket_bytes: the update uses at most twice this much memory beside the model.
        timeout: seconds that a step of an update may take.
    """
    return cast(Transport, resolve_name(path)(world, workers_per_engine, bucket_bytes, timeout))


def update_engines(
    transport: Transport,
    world: World,
    source: WeightSource,
    order: UpdateOrder,
    links: Mapping[int, EngineLink],
    engines: Sequence[int],
    make_room: Callable[[], None] = lambda: None,
) -> Sent:
    """Give idle `engines` the weights of `source`; collective. Return what this rank sent, and the failures
    that it saw. An engine that fails on the way is left without a version, so that it refuses to sample.

    Args:
        links: those of `engines` that this rank owns.
        make_room: collective; lets the ranks give memory back after the weights are sent, before sleeping
            engines wake their caches.

    Raises:
        WeightPlanError: on every rank: an engine lacks something of its model.
        WeightMismatchError: on the ranks whose engines received something other than was sent.
    """
    failures: Failures = {}
    if order.sleeping:
        ask(links, failures, order.timeout, "wake", "weights")
    must_repeat = True
    while must_repeat:
        if not transport.in_one_call:
            ask(links, failures, order.timeout, "start_weight_update", order.check)
        failed = {engine for part in world.all_gather(list(failures)) for engine in part}
        present = [engine for engine in engines if engine not in failed]
        sent = transport.send(source, without(links, failures), present, order)
        failures = sent.failures | failures  # the earlier failure is the cause
        must_repeat = sent.must_repeat
    if transport.in_one_call:
        by_engine = sent.receipts.items()
        _refuse_incomplete(world, {engine: [names for names, _ in workers] for engine, workers in by_engine})
        receipts = {engine: [sums for _, sums in workers] for engine, workers in by_engine}
    else:
        _refuse_incomplete(world, ask(links, failures, order.timeout, "missing_weights"))
        receipts = ask(links, failures, order.timeout, "finish_weight_update", order.version)
    if order.sleeping:
        make_room()
        ask(links, failures, order.timeout, "wake", "kv_cache")
    if order.check:
        sums = {name: number for part in world.all_gather(sent.sums) for name, number in part.items()}
        for workers in receipts.values():
            compare_checksums(sums, workers)
    return replace(sent, failures=failures)


def _refuse_incomplete(world: World, missing: Mapping[int, Sequence[Sequence[str]]]) -> None:
    """Refuse engines with `missing` tensors, which are those that each of their workers lacks."""
    mine = {engine: sorted(set().union(*workers)) for engine, workers in missing.items()}
    for part in world.all_gather(mine):
        for engine, names in part.items():
            if names:
                raise WeightPlanError(f"the weight update did not bring {listed(names)} of engine {engine}")
