"""What is asked of a weight update. Needs no torch: the driver orders, trainers and engines carry out."""

from dataclasses import dataclass
from typing import Literal

TransportName = Literal["gloo", "ipc", "nccl"]
NCCL_BACKEND = "ibpo_nccl"
"""Under which vLLM knows this project's worker for nccl; its own has the shorter name."""


@dataclass(frozen=True, slots=True)
class Order:
    """How an update is done."""

    version: int
    """Of the policy whose weights are sent."""
    sleeping: bool
    """The engines sleep, and wake in the order that needs the least memory: weights, update, KV cache."""
    check: bool
    """Compare checksums of everything as sent and as received."""
    timeout: float
    """Seconds that each step may take."""


def choose_transport(*, on_gpu: bool, colocate: bool) -> TransportName:
    """gloo on CPUs; on GPUs ipc where engines share the trainers' and nccl where they do not."""
    if not on_gpu:
        return "gloo"
    return "ipc" if colocate else "nccl"
