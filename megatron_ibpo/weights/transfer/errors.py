"""How a weight update fails other than by an engine's death."""

from __future__ import annotations

__all__ = ["WeightMismatchError", "WeightPlanError"]


class WeightMismatchError(RuntimeError):
    """An engine does not have the weights that were sent to it."""


class WeightPlanError(ValueError):
    """The trainer's tensors are not those that the engine's model loads."""
