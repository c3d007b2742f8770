"""Engines by name (--rollout-backend), and users' own by import path."""

from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config, RolloutConfig, known_or_path, load_hook
from megatron_ibpo.engines.lean_limits import lean_problems
from megatron_ibpo.engines.needs import EngineNeeds
from megatron_ibpo.engines.vllm.cpu_limits import cpu_problems
from megatron_ibpo.engines.vllm.needs import vllm_needs
from megatron_ibpo.models import ModelShape

FLAG = "--rollout-backend"
VLLM, LEAN = "vllm", "lean"
ENGINES = {VLLM: "megatron_ibpo.engines.vllm.engine:Engine", LEAN: None}
"""Name → import path of the class that an engine's process builds (`engines.protocol.Engine`). None: the
trainer's own process samples, and no cluster is needed."""
LIMITS = {LEAN: lean_problems}
"""Name → function that returns the settings that the engine does not support."""
CPU_LIMITS = {VLLM: cpu_problems}
"""Name → function that returns what the engine cannot compute of a model on CPUs."""

_METHODS = ("wait_ready", "submit", "take", "abort", "kill", "close", "generate", "begin", "result", "call")


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist or lacks a method.

    Raises:
        ConfigError: no such name or import path.
        ValueError: the class lacks a method.
    """
    if known_or_path(FLAG, name, dict.fromkeys(ENGINES, True), "engine"):
        return
    found = load_hook(
        FLAG, name, called_with="its settings, the path of its log, and whether it starts again"
    )
    lacking = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if lacking:
        raise ValueError(
            f"{FLAG} {name}: lacks {', '.join(lacking)}; an engine needs {', '.join(_METHODS)} "
            "(megatron_ibpo.engines.protocol.Engine)"
        )


def check_limits(config: Config, *, trains: bool) -> None:
    """Refuse settings that the engine does not support in a run, or in an evaluation, which does not train.

    Raises:
        ValueError: with a line for every problem.
    """
    limits = LIMITS.get(config.rollout.rollout_backend)
    if limits is not None and (problems := limits(config, trains=trains)):
        raise ValueError("\n".join(problems))


def check_model(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> None:
    """Refuse a model that the engine cannot compute, before it starts.

    Args:
        rollout: settings with device-dependent values resolved (`config.on_device`).

    Raises:
        ValueError: with a line for every problem.
    """
    limits = None if on_gpu else CPU_LIMITS.get(rollout.rollout_backend)
    if limits is not None and (problems := limits(rollout, shape)):
        raise ValueError("\n".join(problems))


def samples_in_trainer(name: str) -> bool:
    """Return whether the trainer's own process samples, so that there are no engine processes."""
    return name in ENGINES and ENGINES[name] is None


def engine_needs(config: Config, *, on_gpu: bool = True) -> EngineNeeds:
    """Return the memory needs of an engine with this configuration: as its class says, or vLLM's by default.

    Args:
        config: configuration with device-dependent values resolved (`config.on_device`).
        on_gpu: whether engines have GPUs; a plan assumes that they will.
    """
    name = config.rollout.rollout_backend
    engine = None if name in ENGINES else load_hook(FLAG, name)
    needs: EngineNeeds = getattr(engine, "needs", vllm_needs)(config, on_gpu)
    return needs


def start_engine(name: str, settings: Any, log: Path, again: bool) -> Any:
    """Start the engine named `name`, in the process that is to own it."""
    own = ENGINES.get(name)
    if own is None:
        return load_hook(FLAG, name)(settings, log, again)
    module, _, kind = own.partition(":")  # not a hook: the user's directory stays off sys.path
    return getattr(import_module(module), kind)(settings, log, again)
