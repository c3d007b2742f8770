"""Experts chosen by routers, by request and position, as `worker.RecordingWorker` keeps them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import ExpertIds, expert_ids

Choices = npt.NDArray[np.int32]
"""[tokens, layers, experts per token]."""


@dataclass
class _RequestRecord:
    """Record of one request."""

    reached: int = 0
    """Positions before this one have been computed or taken from a cache."""
    parts: list[tuple[int, Choices]] = field(default_factory=list)
    """(first position, choices) of the computed parts, without overlap."""


class RoutingRecord:
    """The experts that routers chose, by request and position.

    The first choice of a position counts. A position that is recomputed, after an update of the weights or
    because a request lost its cache, keeps its first log-probs.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._records: dict[str, _RequestRecord] = {}

    def add(self, request: str, start: int, choices: Choices) -> None:
        """Add the choices for the tokens from position `start` on."""
        record = self._records.setdefault(request, _RequestRecord())
        new = choices[max(0, record.reached - start) :]
        if len(new):
            end = start + len(choices)
            record.parts.append((end - len(new), new))
            record.reached = end

    def take(self, request: str, tokens: int) -> ExpertIds | None:
        """Return the choices of the first `tokens` positions and forget them; `no_expert` for a position
        without a record; None if no position has one."""
        record = self._records.pop(request, None)
        if record is None:
            return None
        ids = np.full((tokens, *record.parts[0][1].shape[1:]), -1, np.int32)
        for start, choices in record.parts:
            part = choices[: max(0, tokens - start)]  # a step may have begun past the end of a response
            ids[start : start + len(part)] = part
        return expert_ids(ids, self._num_experts)

    def forget(self, request: str) -> None:
        self._records.pop(request, None)

    def names(self) -> list[str]:
        """Return the names of the requests that have a record."""
        return list(self._records)
