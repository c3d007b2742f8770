"""All trainer ranks as one policy, on the driver's side, and the ranks' reports to it: no torch, no model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatron_ibpo.basics.records import Floats, TrainSequence
from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.policy import planning
from megatron_ibpo.policy.overrides import read_overrides
from megatron_ibpo.policy.planning import Cost, Passes, Plan
from megatron_ibpo.weights.formats.run_state import Keep


class RankCalls(Protocol):
    """A way to call the ranks (`cluster.Trainers`)."""

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on every rank with its own arguments; return the results by rank."""

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` on every rank with the same arguments; return the results by rank."""

    def share(self, value: Any) -> Any:
        """Return an argument that several ranks receive."""

    def restart(self, *arguments: Any) -> None:
        """Replace all ranks by new ones."""


class Policy:
    """The policy under training, and the critic if there is one."""

    def __init__(self, ranks: RankCalls, config: Config, world_size: int, cost: Cost) -> None:
        """`cost` is that of a sequence, for dealing sequences to the data-parallel ranks."""
        self._ranks, self._config, self._cost = ranks, config, cost
        self._shares = [data_parallel_rank(rank, config.parallel, world_size) for rank in range(world_size)]
        self._passes: list[Passes] = []
        self._saves: list[str] = []
        """Remaining stages of the save in progress, each once all ranks rest."""

    def restart(self, checkpoint: Path | None) -> None:
        """Start new trainers, with the weights of the checkpoint, or with the run's initial ones."""
        self._saves.clear()
        self._ranks.restart(self._config, checkpoint)

    def update(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Take one rollout's optimizer steps, of the policy and then of the critic; return the metrics."""
        plan = planning.plan_update(sequences, self._config, self._num_shares, self._cost)
        metrics = self._run("update", plan)[0] | planning.update_metrics(sequences, self._config)
        if read_overrides(self._config).micro_batch_multiple > 1:
            metrics["micro_batches_empty"] = planning.empty_micro_batches(plan.shares)
        if self._config.algorithm.trains_critic:
            plan = planning.plan_value_update(sequences, self._config, self._num_shares, self._cost)
            metrics |= self._run("update_critic", plan)[0]
        return metrics

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[Floats]:
        """Return the log-prob of every response token under the present weights."""
        return self._forward("logprobs", sequences)

    def values(self, sequences: Sequence[TrainSequence]) -> list[Floats]:
        """Return the critic's values before each response token."""
        return self._forward("values", [replace(s, sampling_mask=None) for s in sequences])

    def measure_gradient(
        self, sequences: Sequence[TrainSequence], plain: Sequence[TrainSequence]
    ) -> dict[str, float]:
        """Return the noise of the gradient of `sequences` over prompts, and of GSPO's gradient on `plain`."""
        plan = planning.plan_measure(sequences, plain, self._config, self._num_shares, self._cost)
        return self._run("measure_gradient", plan)[0]

    def save(self, directory: Path, step: int, run_state: dict[str, Any], keep: Keep) -> None:
        """Begin a Megatron checkpoint under `directory`, which all ranks reach, after the one before;
        training may go on. It has its final name once `saved` returns True. Raises OSError or CheckpointError
        if nothing was begun, or the one before failed."""
        self.saved(wait=True)
        self._ranks.call_all("save", directory, step, run_state, keep)
        self._saves = ["seal_save", "end_save"]

    def saved(self, *, wait: bool) -> bool:
        """Return whether no save is in progress any more, after advancing it, and waiting for it with `wait`.
        Raises OSError or CheckpointError if it failed: it is over then, and has left nothing."""
        while self._saves:
            if not all(self._ranks.call_all("save_rests", wait)):
                return False
            (stage, *later), self._saves = self._saves, []
            self._ranks.call_all(stage)
            self._saves = later
        return True

    def save_hf(self, directory: Path) -> None:
        """Write the policy in Hugging Face format."""
        self._ranks.call_all("save_hf", directory)

    def load_weights(self, hf_dir: Path) -> None:
        """Take the weights of a checkpoint of the same model, which all ranks reach."""
        self._ranks.call_all("load_weights", hf_dir)

    def shift_adapters(self, factor: str, amount: float) -> None:
        """Add a number to every element of the adapters' factors, "A" or "B"."""
        self._ranks.call_all("shift_adapters", factor, amount)

    def take_passes(self) -> list[Passes]:
        """Return the passes computed since the last call."""
        passes, self._passes = self._passes, []
        return passes

    @property
    def _num_shares(self) -> int:
        return max(self._shares) + 1

    def _forward(self, method: str, sequences: Sequence[TrainSequence]) -> list[Floats]:
        if not sequences:
            return []
        plan = planning.plan_forward(sequences, self._config, self._num_shares, self._cost)
        return planning.merge_parts(self._run(method, plan), len(sequences))

    def _run(self, method: str, plan: Plan[Any]) -> list[Any]:
        """Run `method` on every rank with the share of its data-parallel rank, sent once to ranks that get
        the same. (A small argument of one call travels in the call itself, in half the time.)"""
        shared = [
            self._ranks.share(plan.shares[share]) if self._shares.count(share) > 1 else plan.shares[share]
            for share in range(self._num_shares)
        ]
        self._passes.append(plan.passes)
        return self._ranks.call_each(method, [(shared[share],) for share in self._shares])


def data_parallel_rank(rank: int, parallel: ParallelConfig, world_size: int) -> int:
    """Return the data-parallel share that rank `rank` of the trainers gets; Megatron counts tensor-parallel
    ranks first and pipeline stages last."""
    inner = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return rank // inner % (world_size // inner // parallel.pipeline_model_parallel_size)


@dataclass(frozen=True, slots=True)
class About:
    """Facts that the driver cannot know before the model is built."""

    parameters: int
    """Number of parameters of the whole model."""
    loss_backend: str
    """Back end that computes the loss, and why."""
    layers: dict[str, tuple[str, str]]
    """Part of a layer → (the library that computes it, how)."""
    device: str
    """Device that computes: the GPU's own name, or "CPU"."""
    notes: tuple[str, ...]
    """Lines for the user about the environment and the loaded checkpoint."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """The outcome of one pass over the weights, as this rank saw it."""

    failures: dict[int, str]
    """Index of an engine → why it no longer takes part in the update."""
    num_bytes: int
    """Bytes that this rank sent to engines."""
    needed_bytes: int
    """Bytes that the shards of all engines' workers take."""
    waits: tuple[int, float]
    """Number and seconds of waits between buckets, as in `weights.transfer.link.Sent`."""
