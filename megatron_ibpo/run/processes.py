"""The processes of a run, and the interface of the back ends that start them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.config import Config
from megatron_ibpo.environments import Sessions
from megatron_ibpo.models import ModelShape
from megatron_ibpo.policy.group import RankCalls
from megatron_ibpo.rewards import Pool
from megatron_ibpo.run.inputs import Inputs, Judges
from megatron_ibpo.run.resolve import ResolvedConfig
from megatron_ibpo.run.state import Engines

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Trainers, engines and verifiers that have been started."""

    trainers: RankCalls
    engines: Engines | None
    """None when recorded rollouts are replayed."""
    verifiers: Pool
    deaths: Callable[[], dict[str, int]]
    """Returns the counts of dead and restarted engines, verifiers and environments so far, by metric."""
    placement_note: str
    """Nodes of the processes, for the user."""
    wait_ready: Callable[[], None] = lambda: None
    """Waits for the processes that the first step needs and start-up does not."""
    environments: Sessions | None = None
    """Places for episodes; None if no prompt names an environment."""


@dataclass(frozen=True)
class TrainersAlone:
    """Trainers that have been started without engines and verifiers."""

    trainers: RankCalls
    placement_note: str
    """Nodes of the processes, for the user."""


@dataclass(frozen=True)
class Launched(Generic[T]):
    """Processes that have been started and have loaded nothing yet."""

    memory: Mapping[int, int]
    """Node, by its index in the placement → its bytes of main memory; empty in one process."""
    build: Callable[[Path | None], T]
    """Builds the model of the trainers from a checkpoint, or as a new one. Engines and verifiers may still be
    starting when it returns."""


class Backend(Protocol):
    """A way to start the processes of a run: on a cluster, or all in the driver's own process."""

    def check(self, config: Config, shape: ModelShape) -> None:
        """Refuse a model or a layout, as far as that shows before devices are counted.

        Raises:
            ValueError: this back end cannot run it.
        """
        ...

    def connect(self, config: Config) -> AbstractContextManager[Callable[[], None]]:
        """Connect to the cluster in the background. The context gives a function that waits for it."""
        ...

    def place(self, config: Config, *, samples: bool = True) -> Placement:
        """Return the place of every process.

        Args:
            samples: False for training without engines.

        Raises:
            ValueError: the cluster is too small, or settings do not suit its devices.
        """
        ...

    def launch(
        self, resolved: ResolvedConfig, inputs: Inputs, judges: Judges, stack: ExitStack
    ) -> Launched[Processes]:
        """Start the processes of trainers, engines and verifiers. `stack` ends them. This, and `build`, raise
        ValueError, OSError, EngineError or ProcessDiedError if one does not start."""
        ...

    def launch_trainers(self, resolved: ResolvedConfig, stack: ExitStack) -> Launched[TrainersAlone]:
        """Start trainers, for training without sampling. `stack` ends them; raises as `launch`."""
        ...
