"""Experts that routers chose, by request and position, as `routing_recorder` keeps them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_ibpo.basics.records import ExpertIds, expert_ids

Choices = npt.NDArray[np.int32]
"""[tokens, layers, experts per token]."""


@dataclass
class _Kept:
    """Record of one request."""

    reached: int = 0
    """Positions before this one have been computed or taken from a cache."""
    parts: list[tuple[int, Choices]] = field(default_factory=list)
    """(first position, choices) of what was computed, without overlap."""


class RoutingRecord:
    """Experts that routers chose, by request and position.

    The first choice of a position counts. What is computed again, after an update of the weights or where a
    request had lost its cache, has its log-probs from before.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._kept: dict[str, _Kept] = {}

    def add(self, request: str, start: int, choices: Choices) -> None:
        """Add the choices for the tokens from position `start` on."""
        kept = self._kept.setdefault(request, _Kept())
        new = choices[max(0, kept.reached - start) :]
        if len(new):
            end = start + len(choices)
            kept.parts.append((end - len(new), new))
            kept.reached = end

    def take(self, request: str, tokens: int) -> ExpertIds | None:
        """Return the choices of the first `tokens` positions and forget them; `no_expert` where there is no
        record, None where there is none at all."""
        kept = self._kept.pop(request, None)
        if kept is None:
            return None
        whole = np.full((tokens, *kept.parts[0][1].shape[1:]), -1, np.int32)
        for start, choices in kept.parts:
            part = choices[: max(0, tokens - start)]  # a step may have begun past the end of a response
            whole[start : start + len(part)] = part
        return expert_ids(whole, self._num_experts)

    def forget(self, request: str) -> None:
        self._kept.pop(request, None)

    def names(self) -> list[str]:
        """Names of the requests that have a record."""
        return list(self._kept)
