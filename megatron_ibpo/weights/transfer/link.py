"""The driver's order for a weight update, and the update's calls to the engines that a rank owns: call all,
then wait for all. Needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Failures = dict[int, Exception]
"""Index of an engine → why it no longer takes part in the update."""
Receipt = tuple[list[str], dict[str, int]]
"""A worker's (tensors that an update did not bring, checksums by tensor if they were requested)."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of one pass over the weights, as this rank saw it."""

    failures: Failures
    num_bytes: int
    """Bytes that this rank sent to engines."""
    needed_bytes: int
    """Bytes that the shards of all engines' workers take."""
    sums: dict[str, int]
    """Checksums of what this rank sent, if requested."""
    must_repeat: bool = False
    """True if no engine has whole weights, since one of them failed on the way: the others must start again.
    The same on every rank."""
    waits: tuple[int, float] = (0, 0.0)
    """Number of times, and seconds, that this rank waited for all ranks and its GPU between buckets (ipc)."""
    receipts: Mapping[int, Sequence[Receipt]] = field(default_factory=dict)
    """Receipts of this rank's engines by worker, if the engines took the update in one call."""


class WeightReceiver(Protocol):
    """An engine as a weight update calls it, over any transport.

    The calls of one update come in this order, with `update_weights` once or several times; over gloo
    `take_weights` makes all of them. An engine that refuses one of them (RuntimeError) has no weights until
    the next update, and must not sample.
    """

    def rehearse_weight_update(self, tensors: bytes) -> list[bytes]:
        """Return, for each worker, what it takes of these tensors: pickled `TensorMeta`s in, `wire.Answer`s
        out. Only gloo calls this, before the first update."""

    def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the trainers' group, or agree on buffers; the transport defines the content of `init_info`."""

    def start_weight_update(self, check: bool) -> None:
        """Stop sampling and prepare for new weights; with `check` keep checksums of what arrives. An update
        that was not finished is given up."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensors; the transport defines the content of `update_info`."""

    def missing_weights(self) -> list[list[str]]:
        """Return the tensors that each worker still lacks."""

    def finish_weight_update(self, version: int) -> list[dict[str, int]]:
        """Go on sampling with the weights as policy `version`; return each worker's checksums by tensor."""

    def take_weights(self, check: bool, version: int) -> list[Receipt]:
        """Run `take_weights` of this module for this engine. Only gloo calls this, which sends all tensors in
        one call of `update_weights`."""


def take_weights(receiver: WeightReceiver, check: bool, version: int) -> list[Receipt]:
    """Take a whole update: start, receive, and finish unless tensors are missing. Return each worker's
    receipt.

    Four calls from a trainer, each of which passes two more processes on its way, took longer than loading a
    small model.
    """
    receiver.start_weight_update(check)
    receiver.update_weights({})
    missing = receiver.missing_weights()
    sums = [{} for _ in missing] if any(missing) else receiver.finish_weight_update(version)
    return list(zip(missing, sums, strict=True))


class EngineLink(Protocol):
    """A `WeightReceiver` as its owner holds it: methods are called by name, and answers fetched later."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting. Raises RuntimeError when the engine is gone."""

    def result(self, timeout: float) -> Any:
        """Return the answer. Raises RuntimeError when the engine is gone or refuses."""


def start(
    links: Mapping[int, EngineLink], method: str, arguments: Callable[[int], tuple[Any, ...]]
) -> Failures:
    """Start `method` on every engine, with the arguments for its index; return the engines that are gone."""
    failures: Failures = {}
    for engine, link in links.items():
        try:
            link.begin(method, *arguments(engine))
        except RuntimeError as error:
            failures[engine] = error
    return failures


def collect(links: Mapping[int, EngineLink], failures: Failures, timeout: float) -> dict[int, Any]:
    """Return the answers of the engines that are not in `failures`. Engines that fail now, or do not answer
    within `timeout` seconds, are added to `failures`."""
    replies = {}
    for engine, link in without(links, failures).items():
        try:
            replies[engine] = link.result(timeout)
        except RuntimeError as error:
            failures[engine] = error
    return replies


def ask(
    links: Mapping[int, EngineLink], failures: Failures, timeout: float, method: str, *arguments: Any
) -> dict[int, Any]:
    """Run `start` and `collect` for the engines that are not in `failures`."""
    remaining = without(links, failures)
    failures |= start(remaining, method, lambda _: arguments)
    return collect(remaining, failures, timeout)


def without(links: Mapping[int, EngineLink], failures: Failures) -> dict[int, EngineLink]:
    """Return the engines that have not failed."""
    return {engine: link for engine, link in links.items() if engine not in failures}


TransportName = Literal["gloo", "ipc", "nccl"]


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """An order to update the engines: which version, and how."""

    version: int
    """Version of the policy whose weights are sent."""
    sleeping: bool
    """True if the engines sleep. They wake in the order that needs the least memory: weights, update, KV
    cache."""
    check: bool
    """True to compare checksums of everything as sent and as received."""
    timeout: float
    """Seconds that each step may take."""
