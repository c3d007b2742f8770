"""Orders for a weight update: the driver gives them, trainers and engines carry them out. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

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
