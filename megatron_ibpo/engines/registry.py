"""Engines by name (--rollout-backend), and users' own by import path."""

from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config, RolloutConfig, known_or_path, load_hook, named_values
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.engines.settings import EngineNeeds
from megatron_ibpo.engines.vllm import needs
from megatron_ibpo.models import ModelShape

FLAG = "--rollout-backend"
VLLM, LEAN = "vllm", "lean"
ENGINES = {VLLM: "megatron_ibpo.engines.vllm.engine:Engine", LEAN: None}
"""Name → import path of the class that an engine's process builds (`engines.protocol.Engine`). None: the
trainer's own process samples, and no cluster is needed."""

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
    if config.rollout.rollout_backend == LEAN and (problems := lean_problems(config, trains=trains)):
        raise ValueError("\n".join(problems))


def lean_problems(config: Config, *, trains: bool) -> list[str]:
    """Return what a run in one process does not support, one line each.

    Args:
        trains: False for an evaluation, which does not train.
    """
    rollout, cluster = config.rollout, config.cluster
    rules = {
        ": only for runs that train; evaluate with vllm": not trains,
        " with --max-staleness: one process cannot sample while it trains": (rollout.max_staleness > 0),
        " with --num-trainers: one process trains": (cluster.num_trainers or 1) > 1,
        " with --ray-address: it uses no Ray": cluster.ray_address is not None,
        " with --vllm-arg: it uses no vLLM": bool(rollout.vllm_arg),
        " with --use-rollout-routing-replay: it samples dense models only": (
            rollout.use_rollout_routing_replay
        ),
        " with --load-debug-rollout-data: a replay samples nothing": (
            config.run.load_debug_rollout_data is not None
        ),
    }
    return [f"--rollout-backend lean{problem}" for problem in broken(rules)]


def check_model(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> None:
    """Refuse a model that the engine cannot compute, before it starts.

    Args:
        rollout: settings with device-dependent values resolved (`config.on_device`).

    Raises:
        ValueError: with a line for every problem.
    """
    computed_on_cpu = rollout.rollout_backend == VLLM and not on_gpu
    if computed_on_cpu and (problems := needs.cpu_problems(rollout, shape)):
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
    own_needs: EngineNeeds = getattr(engine, "needs", needs.vllm_needs)(config, on_gpu)
    return own_needs


def sampling_mask_obstacle(config: Config, *, on_gpu: bool) -> str | None:
    """Return why the engine of a run does not record the ids that top-k and top-p leave
    (`Sample.sampling_mask`), and what to do; None if it does."""
    name = config.rollout.rollout_backend
    if name == LEAN:
        return None
    unknown = f"{name} does not say that it records what these leave; take vllm or lean (docs/extending.md)"
    if name == VLLM:
        return needs.sampling_mask_obstacle(config, on_gpu)
    judge = getattr(load_hook(FLAG, name), "sampling_mask_obstacle", None)
    return unknown if judge is None else judge(config, on_gpu)


def changed_probabilities(config: Config) -> list[str]:
    """Return the arguments of vLLM by which it samples from other probabilities than temperature, top-k and
    top-p leave."""
    given = named_values(config.rollout.vllm_arg).keys() & needs.CHANGE_PROBABILITIES
    return [f"--vllm-arg {name}" for name in sorted(given)]


def start_engine(name: str, settings: Any, log: Path, again: bool) -> Any:
    """Start the engine named `name`, in the process that is to own it."""
    own = ENGINES.get(name)
    if own is None:
        return load_hook(FLAG, name)(settings, log, again)
    module, _, kind = own.partition(":")  # not a hook: the user's directory stays off sys.path
    return getattr(import_module(module), kind)(settings, log, again)
