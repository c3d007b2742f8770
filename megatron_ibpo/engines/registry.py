"""Engines by name (--rollout-backend), and users' own by import path: what they can do in a run, and what is
refused before it starts."""

from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.records import TrainSequence
from megatron_ibpo.basics.rendezvous import environment_number
from megatron_ibpo.config import Config, Registry, RolloutConfig, built, known_or_path, load_hook
from megatron_ibpo.config.config import flag
from megatron_ibpo.config.config_error import broken
from megatron_ibpo.engines.protocol import EngineNeeds, EngineSettings, Precision
from megatron_ibpo.engines.vllm.settings import VllmParameters
from megatron_ibpo.models import ModelShape
from megatron_ibpo.weights.transfer.link import TransportName

FLAG = "--rollout-backend"
VLLM, LEAN = "vllm", "lean"
ENGINES = {
    VLLM: "megatron_ibpo.engines.vllm.engine:Engine",
    LEAN: None,
    "transformers": "megatron_ibpo.engines.transformers_engine:TransformersEngine",
}
"""Name → import path of the class that an engine's process builds (`engines.protocol.Engine`). None: the
trainer's own process samples, and no cluster is needed."""
DEFAULTS = (VLLM, "transformers")
"""Engines of a run that names none: the first that can compute its model."""

TRANSPORTS: dict[TransportName, str] = {
    "gloo": "megatron_ibpo.weights.transfer.gloo:GlooTransport",
    "nccl": "megatron_ibpo.engines.vllm.gpu_transports:NcclTransport",
    "ipc": "megatron_ibpo.engines.vllm.gpu_transports:IpcTransport",
}
"""Transport of weights → import path of the class by which trainers send. Those for GPUs speak to vLLM's own
receivers."""


def choose_transport(*, on_gpu: bool, colocate: bool) -> TransportName:
    """Choose gloo on CPUs; on GPUs ipc if engines share the trainers' GPUs, else nccl."""
    if not on_gpu:
        return "gloo"
    return "ipc" if colocate else "nccl"


_METHODS = ("wait_ready", "submit", "take", "abort", "kill", "close", "generate", "begin", "result", "call")


def find_parameters(name: str) -> type | None:
    """Return the dataclass of the settings that an engine declares; vLLM's if its class declares none; None
    for an engine that has no settings. Raises ConfigError for an unknown name or import path, and ValueError
    if what the class declares is no dataclass."""
    known_or_path(FLAG, name, dict.fromkeys(ENGINES, True), "engine")
    kind = _engine_class(name)
    if kind is None:
        return None
    parameters: type = getattr(kind, "parameters", VllmParameters)
    if not is_dataclass(parameters):
        raise ValueError(f"{FLAG} {name}: its parameters must be a dataclass (docs/extending.md)")
    return parameters


PARAMETERS = Registry("rollout_backend", ENGINES, find_parameters, section="rollout")
"""The settings of engines, for `megatron_ibpo.config.parse_config`."""


def check_engine(rollout: RolloutConfig) -> None:
    """Refuse an engine that does not exist and settings of it that are out of range (ConfigError), and a
    class that lacks a method (ValueError)."""
    name = PARAMETERS.name_of(rollout.rollout_backend)
    built(find_parameters(name), rollout.parameters)
    if known_or_path(FLAG, name, dict.fromkeys(ENGINES, True), "engine"):
        return
    engine = load_hook(
        FLAG, name, called_with="its settings, the path of its log, and whether it starts again"
    )
    lacking = [method for method in _METHODS if not callable(getattr(engine, method, None))]
    if lacking:
        raise ValueError(
            f"{FLAG} {name}: lacks {', '.join(lacking)}; an engine needs {', '.join(_METHODS)} "
            "(megatron_ibpo.engines.protocol.Engine)"
        )
    makes_vllm_settings = _method(name, "make_settings") is _engine_class(VLLM).make_settings
    if makes_vllm_settings and not issubclass(find_parameters(name) or object, VllmParameters):
        raise ValueError(
            f"{FLAG} {name}: has parameters, and needs make_settings, which makes its EngineSettings of them"
        )


def check_limits(config: Config, *, trains: bool) -> None:
    """Refuse settings that the engine does not support in a run, or in an evaluation, which does not train.
    Raises ValueError with a line for every problem."""
    if config.rollout.rollout_backend != LEAN:
        return
    rollout, cluster, replayed = config.rollout, config.cluster, config.run.load_debug_rollout_data
    rules = {
        ": only for runs that train; evaluate with vllm": not trains,
        " with --max-staleness: one process cannot sample while it trains": rollout.max_staleness > 0,
        " with --num-trainers: one process trains": (cluster.num_trainers or 1) > 1,
        " with --ray-address: it uses no Ray": cluster.ray_address is not None,
        " with --use-rollout-routing-replay: it samples dense models only": (
            rollout.use_rollout_routing_replay
        ),
        " with --load-debug-rollout-data: a replay samples nothing": replayed is not None,
    }
    if problems := [f"--rollout-backend lean{problem}" for problem in broken(rules)]:
        raise ValueError("\n".join(problems))


def on_device(config: Config, shape: ModelShape, *, on_gpu: bool, max_context: int | None = None) -> Config:
    """Return the configuration with every device-dependent default resolved, the engine included. Raises
    ValueError if there is no engine of this name.

    Args:
        on_gpu: whether the trainers have GPUs; a plan assumes that they will.
        max_context: limit of tokens in prompt and response; None: as it is.
    """
    bf16 = on_gpu if config.model.bf16 is None else config.model.bf16
    if on_gpu and config.model.share_prompts:
        raise ValueError("--share-prompts True: the kernels of GPUs take whole sequences only; drop it")
    share_prompts = False if on_gpu else config.model.share_prompts
    rollout, (name, obstacles) = config.rollout, _choice(config.rollout, shape, on_gpu=on_gpu)
    rollout = replace(
        rollout,
        rollout_backend=name,
        parameters={} if obstacles else rollout.parameters,
        rollout_max_context_len=rollout.rollout_max_context_len if max_context is None else max_context,
    )
    config = replace(
        config, model=replace(config.model, bf16=bf16, share_prompts=share_prompts), rollout=rollout
    )
    if samples_in_trainer(name) or not issubclass(find_parameters(name) or object, VllmParameters):
        return config
    return replace(config, rollout=_method(name, "on_device")(config, shape, on_gpu))


def fallback_note(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> str | None:
    """Return a line for the user if a run that names no engine samples with another one than vLLM; None
    otherwise."""
    name, obstacles = _choice(rollout, shape, on_gpu=on_gpu)
    if not obstacles:
        return None
    entries, chosen = PARAMETERS.entries(DEFAULTS[0]), rollout.parameters
    idle = [flag(key) for key, value in chosen.items() if value != entries[key].default]
    without = f" ({', '.join(idle)}: no effect)" if idle else ""
    return f"{FLAG} {name} samples{without}, since vLLM cannot: {obstacles[0]}"


def _choice(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> tuple[str, list[str]]:
    """Return the engine of a run, and why it is not the first of `DEFAULTS`. Settings of that engine do not
    count: it refuses those that the model does not allow."""
    if rollout.rollout_backend is not None:
        return rollout.rollout_backend, []
    plain = replace(rollout, parameters={})
    obstacles = {name: _model_problems(name, plain, shape, on_gpu=on_gpu) for name in DEFAULTS}
    able = [name for name, problems in obstacles.items() if not problems]
    if not able or able[0] == DEFAULTS[0]:
        return DEFAULTS[0], []
    return able[0], obstacles[DEFAULTS[0]]


def _model_problems(name: str, rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> list[str]:
    """Return why an engine cannot compute a model, one line each."""
    model_problems = getattr(_engine_class(name), "model_problems", None)
    if model_problems is None:
        return []
    return model_problems(replace(rollout, rollout_backend=name), shape, on_gpu=on_gpu)


def check_model(rollout: RolloutConfig, shape: ModelShape, *, on_gpu: bool) -> None:
    """Refuse a model that the engine cannot compute, before it starts. Raises ValueError with a line for
    every problem, and one for each of `DEFAULTS` that can compute the model. `rollout` is resolved
    (`on_device`)."""
    name = PARAMETERS.name_of(rollout.rollout_backend)
    if problems := _model_problems(name, rollout, shape, on_gpu=on_gpu):
        alternatives = [
            f"{FLAG} {backend} can compute this model"
            for backend in DEFAULTS
            if not _model_problems(backend, replace(rollout, parameters={}), shape, on_gpu=on_gpu)
        ]
        raise ValueError("\n".join([*problems, *alternatives]))


def samples_in_trainer(name: str | None) -> bool:
    """Return whether the trainer's own process samples, so that there are no engine processes."""
    return name in ENGINES and ENGINES[name] is None


def engine_needs(config: Config, *, on_gpu: bool = True) -> EngineNeeds:
    """Return the memory needs of an engine with this resolved configuration (`on_device`): as its class says,
    or vLLM's by default. `on_gpu` says whether engines have GPUs; a plan assumes that they will."""
    return _method(config.rollout.rollout_backend, "needs")(config, on_gpu)


def engine_settings(
    rollout: RolloutConfig, *arguments: Any, records_sampling_mask: bool = False, **options: Any
) -> EngineSettings:
    """Return the settings of one engine, as the `make_settings` of its class says, or vLLM's by default. The
    arguments are those of `engines.vllm.settings.engine_settings`, and so is what it raises. `rollout` is
    resolved (`on_device`)."""
    options["records_sampling_mask"] = records_sampling_mask
    return _method(rollout.rollout_backend, "make_settings")(rollout, *arguments, **options)


def start_timeout(rollout: RolloutConfig, hf_dir: Path) -> float:
    """Return the seconds that the engine may take to start, as its class says, or vLLM's by default."""
    return _method(rollout.rollout_backend, "start_timeout")(rollout, hf_dir)


def run_settings(
    config: Config, hf_dir: Path, shape: ModelShape, *, on_gpu: bool, trains: bool
) -> EngineSettings:
    """Return the settings of each engine of a run, whose process fills in its GPUs. An evaluation, which does
    not train, needs no record of what top-k and top-p leave. Raises as `engine_settings`."""
    rollout = config.rollout
    cuts = trains and bool(rollout.truncation)
    return engine_settings(
        rollout,
        hf_dir,
        shape,
        choose_transport(on_gpu=on_gpu, colocate=rollout.colocate),
        gpus=(),
        num_threads=environment_number("OMP_NUM_THREADS", 1, least=1),
        records_sampling_mask=cuts and not sampling_mask_obstacle(config, on_gpu=on_gpu),
    )


def sampling_mask_obstacle(config: Config, *, on_gpu: bool) -> str | None:
    """Return why the engine of a run does not record the ids that top-k and top-p leave
    (`Sample.sampling_mask`), and what to do; None if it does."""
    name = PARAMETERS.name_of(config.rollout.rollout_backend)
    if name == LEAN:
        return None
    unknown = f"{name} does not say that it records what these leave; take vllm or lean (docs/extending.md)"
    judge = getattr(_engine_class(name), "sampling_mask_obstacle", None)
    return unknown if judge is None else judge(config, on_gpu)


def changed_probabilities(rollout: RolloutConfig) -> list[str]:
    """Return the settings of an engine by which it samples from other probabilities than temperature, top-k
    and top-p leave."""
    return _method(rollout.rollout_backend, "changed_probabilities")(rollout)


def sampling_precision(rollout: RolloutConfig) -> Precision:
    """Return the number format that the engine samples with, as its class says, or vLLM's by default."""
    if samples_in_trainer(rollout.rollout_backend):
        return Precision("float32")
    return _method(rollout.rollout_backend, "precision")(rollout)


def start_engine(name: str | None, settings: Any, log: Path, is_restart: bool = False) -> Any:
    """Start the engine named `name`, in the process that is to own it."""
    return _engine_class(name)(settings, log, is_restart)


def start_instrument(
    rollout: RolloutConfig, hf_dir: Path, shape: ModelShape, *, on_gpu: bool, num_threads: int, log: Path
) -> Any:
    """Start an engine with a checkpoint's weights, to sample without a run, and return it at once. If a run
    has no engine processes, it is a vLLM engine. `rollout` is resolved (`on_device`)."""
    gpus = range(rollout.rollout_num_gpus_per_engine if on_gpu else 0)
    settings = engine_settings(
        rollout, hf_dir, shape, "nccl" if on_gpu else "gloo", gpus=tuple(gpus), num_threads=num_threads
    )
    return (_engine_class(rollout.rollout_backend) or _engine_class(VLLM))(settings, log)


def _engine_class(name: str | None) -> Any:
    """Return the class of an engine by name or import path, or of the default; None for one that has no
    processes."""
    name = PARAMETERS.name_of(name)
    if name not in ENGINES:
        return load_hook(FLAG, name)
    path = ENGINES[name]
    if path is None:
        return None
    module, _, kind = path.partition(":")  # not a hook: the user's directory stays off sys.path
    return getattr(import_module(module), kind)


def _method(name: str | None, method: str) -> Any:
    """Return a static method of an engine's class; vLLM's if the class has none."""
    default = getattr(_engine_class(VLLM), method)
    return getattr(_engine_class(name), method, default)


# -------------------------------------------------------------------------------------------- top-k and top-p
#
# An engine's log-probs are normalised over the ids that top-k and top-p left. Without a record of these ids
# (`Sample.sampling_mask`) the trainer normalises over the whole vocabulary, and its ratios to the engine's
# log-probs are too small by the probability that was cut off.

SCALED = "ratios to the engine's log-probs would be scaled by the probability that was cut off"


def check_truncation(config: Config, readers: Sequence[str] | None = None, *, on_gpu: bool = True) -> None:
    """Refuse a run that compares the trainer's log-probs with the engine's if these are of another
    distribution, which the engine cannot describe. Raises ValueError with a line for every problem.

    Args:
        readers: settings under which the loss reads the engine's log-probs; None: `flag_readers`.
        on_gpu: whether engines have GPUs; assumed until it is known.
    """
    readers = flag_readers(config) if readers is None else readers
    if not readers or config.run.load_debug_rollout_data is not None or config.run.debug_rollout_only:
        return
    named, cuts = " and ".join(readers), config.rollout.truncation
    problems = [
        f"{flag} with {named}: the trainer does not compute what it changes, so ratios to the engine's "
        "log-probs would be wrong; drop one of the two"
        for flag in changed_probabilities(config.rollout)
    ]
    if cuts and (obstacle := sampling_mask_obstacle(config, on_gpu=on_gpu)):
        problems.append(
            f"{' and '.join(cuts)} with {named}: {SCALED}, since {obstacle}, or drop one of the two"
        )
    if problems:
        raise ValueError("\n".join(problems))


def check_recorded(config: Config, sequences: Iterable[TrainSequence]) -> None:
    """Refuse to train on samples without a sampling mask that the loss needs, such as those of an older
    version's journal. Raises ValueError with their number."""
    rollout = config.rollout
    if not rollout.truncation or not (readers := all_readers(config)):
        return
    lacking = sum(_is_cut(s, rollout) for s in sequences if s.sampling_mask is None and not s.off_policy)
    if lacking:
        raise ValueError(
            f"{' and '.join(rollout.truncation)} with {' and '.join(readers)}: {SCALED}, since {lacking} "
            "sequences have no record of what was left; sample them again, without this journal or "
            "recording, or drop one of the two"
        )


def _is_cut(sequence: TrainSequence, rollout: RolloutConfig) -> bool:
    """Return whether top-p or top-k cut what a sequence was sampled from; corrections have no cycles."""
    top_p, top_k = rollout.rollout_top_p, rollout.rollout_top_k
    if sequence.kind == "response":
        top_p, top_k = rollout.top_p_and_k(sequence.index)
    return top_p < 1 or top_k > 0


def flag_readers(config: Config) -> list[str]:
    """Return the flags under which the loss depends on the engine's log-probs, or on older policies that only
    these describe."""
    staleness = config.rollout.max_staleness
    stale = [f"--max-staleness {staleness}"] if staleness else []
    return [*config.loss.engine_logprob_readers, *stale]


def variant_readers(config: Config) -> list[str]:
    """Return the loss variant if it reads the engine's log-probs. Importing torch takes a second. Raises
    ValueError if there is no such variant."""
    from megatron_ibpo.loss import resolve_variant

    variant, _ = resolve_variant(config.loss.loss_variant)
    reads = "rollout_logprobs" in variant.token_inputs
    return [f"--loss-variant {config.loss.loss_variant}"] if reads else []


def all_readers(config: Config) -> list[str]:
    """Return the readers of both kinds."""
    return [*flag_readers(config), *variant_readers(config)]
