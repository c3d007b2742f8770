"""Every setting of a run: typed, with its range, its unit and the reason for its default.

The dataclasses are the one source of flags (`--tensor-model-parallel-size 2`), of recipe keys (YAML, same
names) and of `--print-config`. Each section reports its own conflicts. Names follow Megatron-LM where it has
the flag, and otherwise the usual names in Megatron-based RL systems.
"""

from dataclasses import dataclass, field

from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.config.data import DataConfig
from megatron_ibpo.config.environment import EnvironmentConfig
from megatron_ibpo.config.loss import LossConfig
from megatron_ibpo.config.rollout import RolloutConfig
from megatron_ibpo.config.run import ClusterConfig, RunConfig
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
        checked = (
            self.model,
            self.parallel,
            self.optimizer,
            self.loss,
            self.data,
            self.rollout,
            self.environment,
            self.run,
        )
        missing = self.data.missing(self.run, trains=trains)
        return [*missing, *(problem for section in checked for problem in section.problems(self))]
