"""Experts chosen by routers, by request and position, as `worker.RecordingWorker` keeps them."""

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import ExpertIds, expert_ids

Choices = npt.NDArray[np.int32]
"""[tokens, layers, experts per token]."""


class RoutingRecord:
    """The experts that routers chose, by request and position.

    The first choice of a position counts. A position that is recomputed, after an update of the weights or
    because a request lost its cache, keeps its first log-probs.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._records: dict[str, list[tuple[int, Choices]]] = {}
        """(first position, choices) of each request's parts, one after another."""

    def add(self, request: str, start: int, choices: Choices) -> None:
        """Add the choices for the tokens from position `start` on."""
        parts = self._records.setdefault(request, [])
        last_start, last = parts[-1] if parts else (0, choices[:0])
        reached = last_start + len(last)  # positions before this one have been computed or taken from a cache
        if len(new := choices[max(0, reached - start) :]):
            parts.append((start + len(choices) - len(new), new))

    def take(self, request: str, tokens: int) -> ExpertIds | None:
        """Return the choices of the first `tokens` positions and forget them; `no_expert` for a position
        without a record; None if no position has one."""
        parts = self._records.pop(request, None)
        if parts is None:
            return None
        ids = np.full((tokens, *parts[0][1].shape[1:]), -1, np.int32)
        for start, choices in parts:
            part = choices[: max(0, tokens - start)]  # a step may have begun past the end of a response
            ids[start : start + len(part)] = part
        return expert_ids(ids, self._num_experts)

    def forget(self, request: str) -> None:
        self._records.pop(request, None)

    def names(self) -> list[str]:
        """Return the names of the requests that have a record."""
        return list(self._records)
