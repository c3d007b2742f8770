"""The processes of a run, and the interface of the back ends that start them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from megatron_ibpo.config import Config, ConfigError
from megatron_ibpo.environments import Sessions
from megatron_ibpo.models import ModelShape, check_layout
from megatron_ibpo.models.lora import check_lora
from megatron_ibpo.policy.group import RankCalls
from megatron_ibpo.policy.overrides import model_chunks
from megatron_ibpo.rewards import Pool
from megatron_ibpo.run.inputs import Inputs
from megatron_ibpo.run.loop import Engines, Progress
from megatron_ibpo.run.resume_point import ResumePoint


@dataclass(frozen=True)
class Processes:
    """Trainers, engines and verifiers that have been started."""

    config: Config
    """The configuration with everything resolved that depends on the devices."""
    trainers: RankCalls
    world_size: int
    """Number of trainer ranks."""
    engines: Engines | None
    """None when recorded rollouts are replayed."""
    verifiers: Pool
    accelerators: int
    """GPUs that the run holds; on CPUs its trainer ranks."""
    progress: Progress
    deaths: Callable[[], dict[str, int]]
    """Returns the counts of dead and restarted processes so far, by metric."""
    where: str
    """Nodes of the processes, for the user."""
    wait_ready: Callable[[], None] = lambda: None
    """Waits for the processes that the first step needs and start-up does not."""
    environments: Sessions | None = None
    """Places for episodes; None if no prompt names an environment."""


@dataclass(frozen=True)
class TrainersAlone:
    """Trainers that have been started without engines and verifiers."""

    config: Config
    """The configuration with everything resolved that depends on the devices."""
    trainers: RankCalls
    world_size: int
    where: str
    """Nodes of the processes, for the user."""


class Backend(Protocol):
    """A way to start the processes of a run: on a cluster, or all in the driver's own process."""

    def check(self, config: Config, shape: ModelShape) -> Config:
        """Return the configuration with the back end's choices.

        Raises:
            ValueError: this back end cannot run it.
        """
        ...

    def connect(self, config: Config) -> AbstractContextManager[Callable[[], None]]:
        """Connect to the cluster in the background. The context gives a function that waits for it."""
        ...

    def start(self, point: ResumePoint, inputs: Inputs, stack: ExitStack) -> Processes:
        """Place and start the trainers, engines and verifiers. `stack` ends them.

        Raises:
            ValueError, OSError, EngineError, ProcessDiedError: one did not start; says why and what to do.
        """
        ...

    def start_trainers(
        self, point: ResumePoint, config: Config, elements: dict[str, int], stack: ExitStack
    ) -> TrainersAlone:
        """Place and start trainers, for training without sampling. `stack` ends them.

        Args:
            elements: as in `Inputs`.

        Raises:
            ValueError, OSError, ProcessDiedError: as `start`.
        """
        ...


def check_model_layout(shape: ModelShape, config: Config, world_size: int) -> None:
    """Refuse a layout that cannot hold the model.

    Raises:
        ValueError: with one line per problem.
    """
    if config.replays_routing and not shape.is_moe:
        raise ValueError(
            f"--use-rollout-routing-replay and --use-routing-replay: {shape.family} is dense and routes "
            "nothing; drop them"
        )
    mtp, chunks = config.model.mtp_num_layers, model_chunks(config)
    if problems := check_layout(shape, config.parallel, world_size, chunks, mtp):
        raise ValueError("this layout cannot hold the model:\n  " + "\n  ".join(problems))
    adapted = config.model.lora_rank is not None
    if adapted and (problems := check_lora(config.model, shape, config.parallel, chunks)):
        raise ConfigError("\n  ".join(["these adapters cannot be trained:", *problems]))
