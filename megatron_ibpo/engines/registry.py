"""Engines by name (--rollout-backend), and users' own by import path."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config, RolloutConfig, known_or_path, load_hook, named_values
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.engines.settings import EngineNeeds, EngineSettings
from megatron_ibpo.engines.vllm import needs
from megatron_ibpo.models import ModelShape
from megatron_ibpo.weights.transfer.update_order import TransportName

FLAG = "--rollout-backend"
VLLM, LEAN = "vllm", "lean"
ENGINES = {
    VLLM: "megatron_ibpo.engines.vllm.engine:Engine",
    LEAN: None,
    "transformers": "megatron_ibpo.engines.transformers_engine:TransformersEngine",
}
"""Name → import path of the class that an engine's process builds (`engines.protocol.Engine`). None: the
trainer's own process samples, and no cluster is needed."""

TRANSPORTS: dict[TransportName, str] = {
    "gloo": "megatron_ibpo.weights.transfer.gloo:GlooTransport",
    "nccl": "megatron_ibpo.engines.vllm.gpu_transports:NcclTransport",
    "ipc": "megatron_ibpo.engines.vllm.gpu_transports:IpcTransport",
}
"""Transport of weights → import path of the class by which trainers send. Those for GPUs speak to vLLM's own
receivers."""

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
    model_problems = getattr(_engine_class(rollout.rollout_backend), "model_problems", None)
    if model_problems is not None and (problems := model_problems(rollout, shape, on_gpu=on_gpu)):
        raise ValueError("\n".join([*problems, *_alternatives(rollout, shape, on_gpu=on_gpu)]))


def _alternatives(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> list[str]:
    """Return a line for each other engine of `ENGINES` with processes that can compute the model."""
    checks = {name: getattr(_engine_class(name), "model_problems", None) for name in ENGINES}
    return [
        f"--rollout-backend {name} can compute this model"
        for name, problems in checks.items()
        if problems and not problems(replace(rollout, rollout_backend=name), shape, on_gpu=on_gpu)
    ]


def samples_in_trainer(name: str) -> bool:
    """Return whether the trainer's own process samples, so that there are no engine processes."""
    return name in ENGINES and ENGINES[name] is None


def engine_needs(config: Config, *, on_gpu: bool = True) -> EngineNeeds:
    """Return the memory needs of an engine with this configuration: as its class says, or vLLM's by default.

    Args:
        config: configuration with device-dependent values resolved (`config.on_device`).
        on_gpu: whether engines have GPUs; a plan assumes that they will.
    """
    own_needs: EngineNeeds = _method(config.rollout.rollout_backend, "needs")(config, on_gpu)
    return own_needs


def engine_settings(
    rollout: RolloutConfig,
    hf_dir: Path,
    transport: TransportName,
    *,
    gpus: tuple[int, ...],
    num_threads: int,
    records_sampling_mask: bool = False,
) -> EngineSettings:
    """Return the settings of one engine, as the `make_settings` of its class says, or vLLM's by default.

    Args:
        rollout: settings with device-dependent values resolved (`config.on_device`).
        records_sampling_mask: record the ids that top-k and top-p leave, for training.

    Raises:
        ValueError: the engine cannot be had with these settings.
    """
    settings: EngineSettings = _method(rollout.rollout_backend, "make_settings")(
        rollout,
        hf_dir,
        transport,
        gpus=gpus,
        num_threads=num_threads,
        records_sampling_mask=records_sampling_mask,
    )
    return settings


def start_timeout(rollout: RolloutConfig, hf_dir: Path) -> float:
    """Return the seconds that the engine may take to start, as its class says, or vLLM's by default."""
    seconds: float = _method(rollout.rollout_backend, "start_timeout")(rollout, hf_dir)
    return seconds


def sampling_mask_obstacle(config: Config, *, on_gpu: bool) -> str | None:
    """Return why the engine of a run does not record the ids that top-k and top-p leave
    (`Sample.sampling_mask`), and what to do; None if it does."""
    name = config.rollout.rollout_backend
    if name == LEAN:
        return None
    unknown = f"{name} does not say that it records what these leave; take vllm or lean (docs/extending.md)"
    judge = getattr(_engine_class(name), "sampling_mask_obstacle", None)
    return unknown if judge is None else judge(config, on_gpu)


def changed_probabilities(config: Config) -> list[str]:
    """Return the arguments of vLLM by which it samples from other probabilities than temperature, top-k and
    top-p leave."""
    given = named_values(config.rollout.vllm_arg).keys() & needs.CHANGE_PROBABILITIES
    return [f"--vllm-arg {name}" for name in sorted(given)]


def start_engine(name: str, settings: Any, log: Path, again: bool) -> Any:
    """Start the engine named `name`, in the process that is to own it."""
    return _engine_class(name)(settings, log, again)


def start_instrument(
    rollout: RolloutConfig, hf_dir: Path, *, on_gpu: bool, num_threads: int, log: Path
) -> Any:
    """Start an engine with a checkpoint's weights, to sample without a run, and return it at once; vLLM where
    a run has no engine processes.

    Args:
        rollout: settings with device-dependent values resolved (`config.on_device`).
    """
    gpus = range(rollout.rollout_num_gpus_per_engine if on_gpu else 0)
    settings = engine_settings(
        rollout, hf_dir, "nccl" if on_gpu else "gloo", gpus=tuple(gpus), num_threads=num_threads
    )
    return (_engine_class(rollout.rollout_backend) or _engine_class(VLLM))(settings, log)


def _engine_class(name: str) -> Any:
    """Return the class of an engine by name or import path; None for one that has no processes."""
    if name not in ENGINES:
        return load_hook(FLAG, name)
    path = ENGINES[name]
    if path is None:
        return None
    module, _, kind = path.partition(":")  # not a hook: the user's directory stays off sys.path
    return getattr(import_module(module), kind)


def _method(name: str, method: str) -> Any:
    """Return a static method of an engine's class; vLLM's if the class has none."""
    default = getattr(_engine_class(VLLM), method)
    return getattr(_engine_class(name), method, default)
