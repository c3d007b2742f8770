"""Every setting of a run: typed, with its range, its unit and the reason for its default.

The dataclasses are the one source of flags (`--tensor-model-parallel-size 2`), of recipe keys (YAML, same
names) and of `--print-config`. Each section reports its own conflicts. Names follow Megatron-LM where it has
the flag, and otherwise the usual names in Megatron-based RL systems.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ibpo.config.algorithm import AlgorithmConfig, LossConfig
from megatron_ibpo.config.data import DataConfig
from megatron_ibpo.config.rollout import EnvironmentConfig, RolloutConfig
from megatron_ibpo.config.run import EVAL_PRESETS, ClusterConfig, RunConfig
from megatron_ibpo.config.trainer import ModelConfig, OptimizerConfig, ParallelConfig


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
    def holds_out(self) -> bool:
        """True if prompts of --prompt-data are held out for evaluation, since no others are named."""
        return bool(
            self.run.eval_num_prompts > 0 and self.data.prompt_data and not self.data.eval_prompt_data
        )

    def problems(self, *, trains: bool) -> list[str]:
        """Return the problems that show without a model, data or a registry.

        Args:
            trains: False if the policy is only evaluated.
        """
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
    """Return the sampling settings of one set.

    Args:
        of_the_set: the benchmark's own settings, by field of `RunConfig`.
    """
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
