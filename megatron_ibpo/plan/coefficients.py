"""The coefficients of the roofline: shares of a data sheet's rates that programs reach.

`tools/fit_planner.py` fits them to published runs. They are the same for every GPU, except for one factor on
products per generation.
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "coefficients.yaml"


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Coefficients of the roofline. The defaults are the start of a fit; `fitted` returns the values for
    runs."""

    matmul: float = 0.6
    """Share of the peak that a trainer's matrix products reach."""
    experts: float = 0.4
    """The same for products of experts, whose tokens are unevenly distributed."""
    attention: float = 0.5
    """Share of the peak in bf16 that a trainer's attention reaches."""
    memory: float = 0.7
    """Share of the memory bandwidth that trainers and engines reach."""
    link: float = 0.6
    """Share of a link's or network's bandwidth that exchanges between GPUs reach."""
    train_layer: float = 2e-4
    """Least seconds of a trainer's pass over one layer."""
    prefill: float = 0.5
    """Share of the peak that an engine's products reach."""
    engine_layer: float = 5e-5
    """Seconds that a layer adds to a step of an engine, whatever it reads and computes."""
    engine_sequence: float = 2e-5
    """Seconds of the host per running sequence and step of an engine."""
    update: float = 0.1
    """Share of the bandwidth that a weight update reaches."""
    host: float = 0.5
    """Share of the bandwidth to main memory that state moves, and an optimizer there, reach."""
    step: float = 5.0
    """Seconds of a step outside its stages."""
    loop: float = 1.2
    """Time of a trainer or engine within a training loop, relative to a benchmark."""
    ampere: float = 1.0
    """Share of the peak that products reach on A100, relative to Hopper's share."""
    blackwell: float = 1.0
    """The same for B200 and GB200."""
    cdna: float = 1.0
    """The same for MI300X."""

    def on(self, generation: str) -> float:
        """Return the factor on products of a generation; 1 where it has none."""
        return {"ampere": self.ampere, "blackwell": self.blackwell, "cdna": self.cdna}.get(generation, 1.0)

    def within_a_loop(self) -> "Coefficients":
        """Return coefficients that make trainers and engines slower by `loop`."""
        rates = {name: getattr(self, name) / self.loop for name in _RATES}
        seconds = {name: getattr(self, name) * self.loop for name in _SECONDS}
        return replace(self, **rates, **seconds, loop=1.0)


_RATES = ("matmul", "experts", "attention", "memory", "link", "prefill", "host")
_SECONDS = ("train_layer", "engine_layer", "engine_sequence")
NAMES = tuple(field.name for field in fields(Coefficients))


@dataclass(frozen=True)
class Fitted:
    """Coefficients, and the errors of their predictions."""

    coefficients: Coefficients
    error: dict[str, float]
    """Kind of prediction → 90 % error factor on held-out runs."""


@cache
def fitted() -> Fitted:
    """Return the coefficients that `tools/fit_planner.py` saved."""
    raw: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return Fitted(Coefficients(**raw["coefficients"]), raw["error"])
