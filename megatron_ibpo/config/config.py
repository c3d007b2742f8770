"""Every setting of a run: typed, with its range, its unit and the reason for its default.

The dataclasses are the one source of flags, of recipe keys and of `--print-config`; names are unique. They
follow Megatron-LM where it has the flag, and otherwise the usual names in Megatron-based RL systems.
"""

import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from megatron_ibpo.basics.text import shown
from megatron_ibpo.config.algorithm import AlgorithmConfig, LossConfig
from megatron_ibpo.config.config_error import ConfigError
from megatron_ibpo.config.data import DataConfig
from megatron_ibpo.config.paths import Kind, hub_id, path_in_recipe, path_of_user, relocated, source_located
from megatron_ibpo.config.rollout import EnvironmentConfig, RolloutConfig
from megatron_ibpo.config.run import EVAL_PRESETS, ClusterConfig, RunConfig
from megatron_ibpo.config.trainer import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ibpo.config.values import EVAL_SETS, NAMED_VALUES, OF_ALL, Range, named_values


@dataclass
class Config:
    """All settings, by section. Flags and recipe keys do not name the section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def replays_routing(self) -> bool:
        """True if the trainer's routers reuse expert choices of an earlier pass."""
        return self.rollout.use_rollout_routing_replay or self.loss.use_routing_replay

    @property
    def excluding_shared_prompts(self) -> list[str]:
        """Flags of settings under which every sequence must go through the trainer's model as a whole."""
        flags = {
            "--context-parallel-size": self.parallel.context_parallel_size > 1,
            "--use-routing-replay": self.loss.use_routing_replay,
            "--use-rollout-routing-replay": self.rollout.use_rollout_routing_replay,
            "--moe-aux-loss-coeff": self.model.moe_aux_loss_coeff > 0,
            "--mtp-num-layers": self.model.mtp_num_layers > 0,
            # a loss of each token that a router sees, as the balancing loss is
            "--model-override moe_z_loss_coeff": "moe_z_loss_coeff"
            in named_values(self.model.model_override),
        }
        return [flag for flag, excludes in flags.items() if excludes]

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes a prompt once for all its responses, in a configuration resolved for
        its devices."""
        return self.model.share_prompts is not False and not self.excluding_shared_prompts

    @property
    def holds_out(self) -> bool:
        """True if prompts of --prompt-data are held out for evaluation, since no others are named."""
        return bool(
            self.run.eval_num_prompts > 0 and self.data.prompt_data and not self.data.eval_prompt_data
        )

    def problems(self, *, trains: bool) -> list[str]:
        """Return the problems that show without a model, data or a registry, of a policy that is trained or
        only evaluated."""
        return [
            *self.data.missing(self.run, trains=trains),
            *self.model.problems(self.loss, self.algorithm),
            *self.parallel.problems(),
            *self.optimizer.problems(self.model, self.parallel, self.run),
            *self.loss.problems(self.rollout.rollout_batch_size),
            *self.data.problems(self.algorithm, self.run),
            *self.rollout.problems(self.algorithm, self.run),
            *self.environment.problems(self.rollout),
            *self.run.problems(),
            *self._problems_of_shared_prompts(),
        ]

    def _problems_of_shared_prompts(self) -> list[str]:
        return [
            f"--share-prompts True: {flag} needs whole sequences; drop one of them"
            for flag in (self.excluding_shared_prompts if self.model.share_prompts else [])
        ]


@dataclass(frozen=True)
class EvalSampling:
    """Sampling settings for one set of held-out prompts."""

    samples: int
    """Responses per prompt."""
    max_tokens: int
    """Limit per response."""
    temperature: float
    top_p: float
    top_k: int
    """-1: off."""


def eval_sampling(config: Config, of_the_set: Mapping[str, Any] | None = None) -> EvalSampling:
    """Return the sampling settings of one set. A benchmark may have settings of its own, by field of
    `RunConfig`."""
    run, rollout = config.run, config.rollout
    preset = EVAL_PRESETS[run.eval_preset] if run.eval_preset is not None else {}
    in_general = {
        "n_samples_per_eval_prompt": 1,
        "eval_temperature": rollout.rollout_temperature,
        "eval_top_p": rollout.rollout_top_p,
        "eval_top_k": rollout.rollout_top_k,
        "eval_max_response_len": rollout.rollout_max_response_len,
    }
    given = {name: getattr(run, name) for name in in_general if getattr(run, name) is not None}
    chosen = in_general | dict(of_the_set or {}) | preset | given
    return EvalSampling(
        samples=chosen["n_samples_per_eval_prompt"],
        max_tokens=chosen["eval_max_response_len"],
        temperature=chosen["eval_temperature"],
        top_p=chosen["eval_top_p"],
        top_k=chosen["eval_top_k"],
    )


PARAMETERS = "parameters"
"""Field of a section that holds the parameters of its choices."""


@dataclass(frozen=True)
class Entry:
    """One field of one section."""

    name: str
    section: str
    type: Any
    ranges: tuple[Range, ...]
    kind: Kind | None
    """None as well for fields whose type already says whether they hold a path."""
    default: Any = None
    """Default of a parameter; the defaults of fields are those of `Config()`."""
    is_parameter: bool = False
    """True for a parameter of a choice in this section."""

    def get(self, config: Config) -> Any:
        section = getattr(config, self.section)
        if self.is_parameter:
            return section.parameters.get(self.name, self.default)
        return getattr(section, self.name)

    def put(self, config: Config, value: Any) -> None:
        section = getattr(config, self.section)
        if self.is_parameter:
            section.parameters[self.name] = value
        else:
            setattr(section, self.name, value)

    def out_of_range(self, value: Any) -> str | None:
        """Return an error message if `value` is out of range, otherwise None."""
        broken = None if value is None else next((r for r in self.ranges if not r.holds(value)), None)
        return None if broken is None else f"{flag(self.name)}: must be {broken.rule}, is {shown(value)}"

    @property
    def has_names(self) -> bool:
        """True if the field holds "name=value" settings; later ones are added to earlier ones."""
        return NAMED_VALUES in self.ranges

    def located(self, value: Any, *, in_recipe: bool) -> Any:
        """Return `value` with paths made absolute; other values, Hub ids too, are returned unchanged."""
        if value is None or not (self.kind or isinstance(value, Path)):
            return value
        locate = path_in_recipe if in_recipe and self.kind is not Kind.WRITTEN else path_of_user
        if self.kind is Kind.MODEL and hub_id(value) is not None:
            return value
        if self.kind is not Kind.FILE_OR_URL:
            return type(value)(locate(value))
        if EVAL_SETS in self.ranges:
            return relocated(value, lambda spec: source_located(spec, locate))
        if isinstance(value, tuple):
            return tuple(source_located(spec, locate) for spec in value)
        return source_located(value, locate)


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def entry_of(name: str, section: str, hint: Any, *, default: Any = None, is_parameter: bool = False) -> Entry:
    """Return the entry of a field with this type."""
    plain, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    ranges = (*OF_ALL, *(extra for extra in extras if isinstance(extra, Range)))
    kinds = [extra for extra in extras if isinstance(extra, Kind)]
    return Entry(name, section, plain, ranges, kinds[0] if kinds else None, default, is_parameter)


ENTRIES = {
    name: entry_of(name, section, hint)
    for section, kind in typing.get_type_hints(Config).items()
    for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    if name != PARAMETERS
}


def check_config(
    config: Config, rooms: Iterable[Callable[[Config], object]] = (), *, trains: bool = True
) -> None:
    """Refuse a configuration that cannot work.

    Args:
        rooms: checks by other parts of the package, such as for known loss variants; each raises ValueError
            with one line per problem.
        trains: False if the policy is only evaluated.

    Raises:
        ConfigError: with all problems at once, each naming its flag.
    """
    problems = [problem for e in ENTRIES.values() if (problem := e.out_of_range(e.get(config)))]
    problems += config.problems(trains=trains)
    for check in rooms:
        try:
            check(config)
        except ValueError as error:
            problems += str(error).splitlines()
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the configuration:", *problems]))
