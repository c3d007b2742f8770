"""What programs reach of the hardware: a few numbers, fitted to published runs (`tools/fit_planner.py`).

They are shares of a data sheet's figure, or seconds. They hold for all hardware alike, but for one factor on
products of each generation: more of them would fit better and predict worse.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "efficiencies.yaml"


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Defaults are what the fit starts from; a run uses `fitted`."""

    matmul: float = 0.7
    """Of the peak in bf16, in products of dense layers."""
    matmul_fp8: float = 0.5
    """Of the peak in fp8, in the same."""
    experts: float = 0.45
    """Of the peak, in products of experts; in fp8 as much less as dense products reach."""
    attention: float = 0.5
    """Of the peak in bf16, in attention of training."""
    elementwise: float = 0.6
    """Of the memory's bandwidth, in what lies between products, in training."""
    link: float = 0.6
    """Of a link's or network's bandwidth, in what nothing hides."""
    routing: float = 1.2
    """Tokens of the slowest rank's experts over an even share, where nothing forces them to balance."""
    train_layer: float = 2e-4
    """Seconds that a pass over one layer takes at least, whatever it computes."""
    decode: float = 0.7
    """Of the memory's bandwidth, in reading weights, caches and states while engines write."""
    prefill: float = 0.5
    """Of the peak, in an engine's products."""
    engine_layer: float = 2e-5
    """Seconds of one layer of a step of an engine beyond what it reads and computes."""
    engine_tensor: float = 1.5e-5
    """The same of a layer whose results several GPUs add up, twice."""
    engine_sequence: float = 2e-5
    """Seconds of a step for each running sequence: scheduling, detokenizing, beside what GPUs do."""
    engine_request: float = 5e-3
    """Seconds that a request costs a server, however long it is."""
    gather: float = 0.1
    """Of the bandwidth between trainers and engines, in a weight update that gathers and broadcasts all."""
    reshard: float = 0.5
    """The same, in one that sends each region to where it belongs."""
    ipc: float = 0.1
    """Of the link's bandwidth, in one between processes of the same GPUs."""
    host: float = 0.5
    """Of the bandwidth to main memory, for what waits there."""
    host_adam: float = 1.5e10
    """Bytes per second for each GPU that the processors' Adam reads and writes."""
    step: float = 5.0
    """Seconds of a step of reinforcement learning that belong to none of its stages."""
    loop: float = 1.0
    """What engines and trainers take within a loop of reinforcement learning over what the same layers take
    in a benchmark of theirs alone."""
    ampere: float = 1.0
    """What products reach of the peak on A100, over what they reach on Hopper."""
    blackwell: float = 1.0
    """The same on B200 and GB200."""
    cdna: float = 1.0
    """The same on MI300X."""
    tensorrt: float = 1.0
    """What an engine's products reach in TensorRT-LLM over vLLM and SGLang. Published rows alone have it."""

    def on(self, generation: str) -> float:
        """The factor of a generation; 1 of those that have none."""
        return {"ampere": self.ampere, "blackwell": self.blackwell, "cdna": self.cdna}.get(generation, 1.0)

    def within_a_loop(self) -> "Efficiencies":
        """What is left of them there: all that a pass or an engine's step consists of takes `loop` times as
        long."""
        rates = {name: getattr(self, name) / self.loop for name in _RATES}
        return replace(
            self, **rates, **{name: getattr(self, name) * self.loop for name in _SECONDS}, loop=1.0
        )


_RATES = (
    "matmul", "matmul_fp8", "experts", "attention", "elementwise", "link", "decode", "prefill", "host",
    "host_adam",
)  # fmt: skip
_SECONDS = ("train_layer", "engine_layer", "engine_tensor", "engine_sequence", "engine_request")
PARAMETERS = tuple(field.name for field in fields(Efficiencies))


@dataclass(frozen=True)
class Fitted:
    """The outcome of the fit."""

    efficiencies: Efficiencies
    intervals: dict[str, tuple[float, float]]
    """Parameter → its interval of 90 %, from the scatter of the fitted rows and how much each moves it. Those
    that no row moves have none."""
    error: dict[str, float]
    """Kind of row → factor within which nine of ten held-out predictions lie, both ways."""


@cache
def fitted() -> Fitted:
    """As `tools/fit_planner.py` left them; the defaults where it never ran."""
    if not FILE.exists():
        return Fitted(Efficiencies(), {}, {})
    raw: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    values = {name: entry["value"] for name, entry in raw["parameters"].items()}
    intervals = {
        name: (entry["low"], entry["high"]) for name, entry in raw["parameters"].items() if "low" in entry
    }
    return Fitted(replace(Efficiencies(), **values), intervals, raw["error"])


def save(outcome: Fitted) -> None:
    """Into `FILE`."""

    def entry(name: str, value: float) -> dict[str, float]:
        bounds = zip(("low", "high"), outcome.intervals.get(name, ()), strict=False)
        return {key: float(f"{number:.4g}") for key, number in (("value", value), *bounds)}

    parameters = {name: entry(name, value) for name, value in asdict(outcome.efficiencies).items()}
    head = "# Made by tools/fit_planner.py --save; megatron_ibpo/plan/efficiencies.py says what each is.\n"
    raw = {"parameters": parameters, "error": outcome.error}
    FILE.write_text(head + yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
