"""Messages between an engine's owner and its process: plain data over a separate socket."""

from typing import Any, Literal, NamedTuple

from megatron_ibpo.basics.records import ExpertIds, Floats, SampleRequest, TokenIds
from megatron_ibpo.basics.sampling_mask import SamplingMask

MARK = "drafted"
"""Name in `SamplingParams.extra_args` of whether vLLM drafts tokens of a request."""


class Call(NamedTuple):
    """A request to run a method of the engine. Every call but submit and abort gets one `Answer`."""

    method: str
    arguments: tuple[Any, ...]


class NumberedRequest(NamedTuple):
    """A request with the owner's number, as sent to the engine in submit."""

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
    sampling_mask: SamplingMask | None
    drafts: tuple[int, int]


class Samples(NamedTuple):
    """Finished samples. An empty list is a sign of life from a busy engine."""

    finished: list[Finished]


class Unsampled(NamedTuple):
    """The engine refuses these requests and is unchanged."""

    numbers: list[int]
    reason: str


class Answer(NamedTuple):
    """The result of a call; in the first message, the seconds that starting took."""

    value: Any


class Refused(NamedTuple):
    """The engine cannot do what was called, and is unchanged."""

    reason: str


Message = Samples | Unsampled | Answer | Refused
"""Any message from the engine."""
