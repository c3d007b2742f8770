"""Messages between an engine's owner and its process. Plain data over a socket of their own."""

from typing import Any, Literal, NamedTuple

from megatron_ibpo.basics.records import ExpertIds, Floats, SampleRequest, TokenIds


class Call(NamedTuple):
    """The owner asks the engine to run a method. Every call but submit and abort gets one `Answer`."""

    method: str
    arguments: tuple[Any, ...]


class Asked(NamedTuple):
    """A request under the number that the owner gave it, as it goes to the engine in submit."""

    number: int
    request: SampleRequest


class Finished(NamedTuple):
    """A sample that the engine has finished."""

    number: int
    token_ids: TokenIds
    logprobs: Floats
    finish_reason: Literal["stop", "length"]
    versions: tuple[tuple[int, int], ...]
    """(first token, policy version) of each span, as in `Sample.versions`."""
    routed_experts: ExpertIds | None


class Samples(NamedTuple):
    """Samples that have finished. An empty list is a sign of life from a busy engine."""

    finished: list[Finished]


class Unsampled(NamedTuple):
    """The engine refuses these requests and is as it was."""

    numbers: list[int]
    why: str


class Answer(NamedTuple):
    """The result of a call; of the first message, the seconds that starting took."""

    value: Any


class Refused(NamedTuple):
    """The engine cannot do what was called, and is as it was."""

    why: str


Message = Samples | Unsampled | Answer | Refused
"""Any message from the engine."""
