"""Where a run's samples and rewards come from."""

from __future__ import annotations

from typing import Protocol

from megatron_ibpo.credit import CreditContext
from megatron_ibpo.records import Group

__all__ = ["Rollouts"]


class Rollouts(Protocol):
    """Engines and verifiers, or a recording of what they said."""

    def groups(self, step: int, context: CreditContext) -> list[Group]:
        """The groups of step `step` (counted from 0), ordered by prompt: scored, corrections attached."""
        ...

    def metrics(self) -> dict[str, float]:
        """What was measured of the last step's sampling."""
        ...
