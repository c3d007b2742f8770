"""GPU types as data: one file each with the figures of a data sheet, for dense products."""

import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_PLACE = Path(__file__).parent
_START = 8.4e-6
_LINK_START, _NETWORK_START = 3.4e-6, 14e-6
"""Seconds before a message between two GPUs starts to arrive, and the extra seconds on a link or the network.
These are the figures by which NCCL chooses how to send (its src/graph/tuning.cc, ring, protocol Simple)."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU type and its links. The shares of its rates that programs reach are in `plan.workload`."""

    name: str
    about: str
    source: str
    memory_gib: float
    """Memory that a program sees."""
    memory_bandwidth: float
    """Bytes per second."""
    peak_bf16: float
    """Floating-point operations per second of dense products."""
    peak_fp8: float
    linked: int
    """Number of GPUs that `link` joins: those of a node, or of a rack."""
    link: float
    """Bytes per second that a GPU sends to linked GPUs."""
    network: float
    """Bytes per second that it sends to all other GPUs."""
    host_link: float
    """Bytes per second that it sends to main memory."""
    generation: str = ""
    """Generation of the design; `plan.workload` has a factor for some."""

    def peak(self, precision: str) -> float:
        """Return the operations per second of products in `bf16`, or in any kind of fp8."""
        return self.peak_bf16 if precision == "bf16" else self.peak_fp8

    def between(self, gpus: int) -> float:
        """Return the bytes per second that each of neighbouring GPUs sends to the others at once."""
        return self.link if gpus <= self.linked else self.network

    def start(self, gpus: int) -> float:
        """Return the seconds before a message between two of `gpus` neighbouring GPUs starts to arrive."""
        return _START + (_LINK_START if gpus <= self.linked else _NETWORK_START)

    def collective(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes per second at which each of `ranks`, `stride` GPUs apart, gathers or reduces.

        Rings between nodes use the networks of all members of a node.
        """
        if ranks * stride <= self.linked:
            return self.link
        return min(self.link, self.network * max(1, self.linked // stride))


def hardware_names() -> list[str]:
    """Return the names that `read_hardware` knows."""
    return sorted(path.stem for path in _PLACE.glob("*.yaml"))


@cache
def read_hardware(name: str) -> Hardware:
    """Return a GPU type by its name. Raises ValueError for an unknown name."""
    path = _PLACE / f"{name.lower()}.yaml"
    if name.lower() not in hardware_names():
        raise ValueError(f"no hardware {name!r}; there are {', '.join(hardware_names())}")
    figures: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    numbers = {field.name: float(figures[field.name]) for field in fields(Hardware) if field.type is float}
    return Hardware(name=name.lower(), **figures | numbers)


def kind_of(device: str) -> str | None:
    """Return the name of the file for a GPU's device name, such as "NVIDIA H100 80GB HBM3"; None if there is
    none.

    PCIe cards, and those with less memory, have lower figures than their namesakes here.
    """
    words = re.split(r"[\s-]+", device.lower())
    if {"pcie", "nvl", "40gb"} & set(words):
        return None
    return next((name for name in hardware_names() if name in words), None)
