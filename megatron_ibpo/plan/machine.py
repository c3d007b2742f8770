"""The machine of a prediction: a GPU by its data sheet, or one that `ibpo calibrate` measured; and the
coefficients of the roofline, shares of a data sheet's rates that programs reach.

A calibrated machine's file holds a data sheet like those of `plan.hardware`, the coefficients reached there,
the work of a step of the recipe, and the run that it was measured with.

`tools/fit_planner.py` fits the coefficients to published runs. They are the same for every GPU, except for
one factor on products per generation. `ibpo calibrate` measures them on a machine that has no data sheet.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_ibpo.basics.user_files import RECIPE_BYTES, read_user_file
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import PARAMETERS as ENGINES
from megatron_ibpo.models import ModelShape
from megatron_ibpo.plan.hardware import Hardware, hardware_of, read_hardware

FILE = Path(__file__).parent / "coefficients.yaml"


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The coefficients. The defaults are the start of a fit; `fitted` returns the values for runs."""

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
    """Kind of prediction → 90 % error factor on held-out runs; empty for a calibrated machine."""


@cache
def fitted() -> Fitted:
    """Return the coefficients that `tools/fit_planner.py` saved."""
    raw: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return Fitted(Coefficients(**raw["coefficients"]), raw["error"])


_HEAD = "# Made by `ibpo calibrate`; megatron_ibpo/plan/machine.py says what each entry is.\n"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The work of a measured step that the configuration does not determine."""

    responses: tuple[float, ...]
    """Evenly spread quantiles of the tokens of responses."""
    prompt: float
    """Mean tokens of a prompt."""
    corrections: float
    """Corrections per response."""
    correction_prompt: float
    """Tokens of a correction's prompt beyond those of a response's."""
    trained: float
    """Share of the sampled tokens, prompts included, that was trained on. Sequences without an advantage are
    left out; a correction is trained with the responses that it was shown."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware, with its coefficients."""

    hardware: Hardware
    known: Fitted
    workload: str | None = None
    """Run that it was measured with (`workload_of`); None if it serves all runs."""
    seen: Seen | None = None


def workload_of(config: Config, shape: ModelShape, world_size: int) -> str:
    """Return a description of everything that runs must share for measurements of one to apply to another;
    batch and lengths may differ."""
    parallel, rollout = config.parallel, config.rollout
    where = "beside them" if rollout.colocate else f"of their own, {rollout.rollout_num_gpus or world_size}"
    return (
        f"{config.algorithm.advantage_estimator} of a {shape.family} of {shape.num_layers} layers of "
        f"{shape.hidden_size}, vocabulary {shape.vocab_size}, on {world_size} trainers as "
        f"TP{parallel.tensor_model_parallel_size} PP{parallel.pipeline_model_parallel_size} "
        f"CP{parallel.context_parallel_size} EP{parallel.expert_model_parallel_size}, engines of "
        f"{rollout.rollout_num_gpus_per_engine} {where} ({ENGINES.name_of(rollout.rollout_backend)})"
    )


@cache
def find_machine(named: str) -> Machine:
    """Return a kind of GPU by its name, or a machine by its file.

    Raises:
        ValueError: there is neither.
    """
    if not named.endswith(".yaml"):
        return Machine(hardware=read_hardware(named), known=fitted())
    path = Path(named)
    try:
        raw: dict[str, Any] = yaml.safe_load(read_user_file(path, RECIPE_BYTES))
        reached = Coefficients(**{name: float(value) for name, value in raw["reached"].items()})
        seen = {**raw["seen"], "responses": tuple(map(float, raw["seen"]["responses"]))}
        return Machine(
            hardware=hardware_of(path.stem, raw),
            known=Fitted(reached, {}),
            workload=str(raw["workload"]),
            seen=Seen(**seen),
        )
    except OSError as error:
        raise ValueError(
            f"--dry-run-hardware {named}: {error.strerror}; `ibpo calibrate` writes it"
        ) from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--dry-run-hardware {named}: not a file of `ibpo calibrate`: {error!r:.200}"
        ) from None


def write_machine(machine: Machine, path: Path) -> None:
    """Write the file that `find_machine` reads."""
    assert machine.seen is not None
    hardware = {name: _short(value) for name, value in asdict(machine.hardware).items() if name != "name"}
    reached = {name: _short(value) for name, value in asdict(machine.known.coefficients).items()}
    seen = {name: _short(value) for name, value in asdict(machine.seen).items()}
    raw = {**hardware, "workload": machine.workload, "reached": reached, "seen": seen}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_HEAD + yaml.safe_dump(raw, sort_keys=False, width=110), encoding="utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return [_short(item) for item in value] if isinstance(value, tuple) else value
