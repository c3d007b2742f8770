"""Every knob of a run: typed, with its range, its unit and the reason for its default.

The dataclasses are the one source of flags (`--tensor-model-parallel-size 2`), of recipe keys (YAML, same
names) and of `--print-config`. What cannot go together is said by the section that it is about. Spelling
follows Megatron-LM where it has the flag, and otherwise what users of Megatron-based RL systems type.
"""

from dataclasses import dataclass, field

from megatron_ibpo.config.algorithm import AlgorithmConfig
from megatron_ibpo.config.data import DataConfig
from megatron_ibpo.config.loss import LossConfig
from megatron_ibpo.config.rollout import RolloutConfig
from megatron_ibpo.config.run import ClusterConfig, RunConfig
from megatron_ibpo.config.trainer import ModelConfig, OptimizerConfig, ParallelConfig


@dataclass
class Config:
    """All of it, by section. Flags and recipe keys do not name the section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def replays_routing(self) -> bool:
        """The trainer's routers choose experts that were chosen before."""
        return self.rollout.use_rollout_routing_replay or self.loss.use_routing_replay

    def problems(self, *, trains: bool) -> list[str]:
        """Return what cannot work, as far as that shows without a model, data or a registry.

        Args:
            trains: otherwise the policy is evaluated and no more.
        """
        checked = (self.model, self.parallel, self.optimizer, self.loss, self.data, self.rollout, self.run)
        missing = self.data.missing(self.run, trains=trains)
        return [*missing, *(problem for section in checked for problem in section.problems(self))]
