"""Calls of a weight update to the engines that a rank owns: call all, then wait for all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Failures = dict[int, Exception]
"""Index of an engine → why it no longer takes part in the update."""


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
    again: bool = False
    """True if no engine has whole weights, since one of them failed on the way: the others must start again.
    The same on every rank."""
    waits: tuple[int, float] = (0, 0.0)
    """Number of times, and seconds, that this rank waited for all ranks and its GPU between buckets (ipc)."""


class EngineLink(Protocol):
    """An engine as its owner holds it (`megatron_ibpo.engines.vllm.engine.Engine`)."""

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
    """Return the answers of the engines that are not in `failures`. Adds to it those that fail now or do not
    answer within `timeout` seconds."""
    answers = {}
    for engine, link in without(links, failures).items():
        try:
            answers[engine] = link.result(timeout)
        except RuntimeError as error:
            failures[engine] = error
    return answers


def ask(
    links: Mapping[int, EngineLink], failures: Failures, timeout: float, method: str, *arguments: Any
) -> dict[int, Any]:
    """Run `start` and `collect` for the engines that are not in `failures`."""
    left = without(links, failures)
    failures |= start(left, method, lambda _: arguments)
    return collect(left, failures, timeout)


def without(links: Mapping[int, EngineLink], failures: Failures) -> dict[int, EngineLink]:
    """Return the engines that have not failed."""
    return {engine: link for engine, link in links.items() if engine not in failures}
