"""Messages between trainers and the workers of an engine before a weight update. They go through vLLM
pickled: vLLM's processes pass bytes on unchanged."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ibpo.weights.layout.regions import Buckets, Need, Sender, TensorMeta, plan_buckets
from megatron_ibpo.weights.weight_errors import WeightPlanError, listed


@dataclass(frozen=True)
class WirePlan:
    """The plan that a worker needs to receive an update."""

    metas: list[TensorMeta]
    senders: Sequence[tuple[Sender, ...]]
    """Senders of each tensor: (rank in the group, region)."""
    bucket_bytes: int

    @property
    def buckets(self) -> Buckets:
        return plan_buckets(self.metas, self.bucket_bytes)


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a rehearsal."""

    needs: list[Need | None]
    """Needs of each tensor."""
    forgotten: list[str]
    """Parameters of its model that no tensor reached."""
    error: str | None
    """Reason why loading failed, if it did."""


def read_answers(
    engine: int, pickled: Sequence[bytes], metas: Sequence[TensorMeta]
) -> list[list[Need | None]]:
    """Return the needs of each worker of `engine`.

    Raises:
        WeightPlanError: names the tensors that no worker knows and the parameters that no tensor reaches.
    """
    answers: list[Answer] = [pickle.loads(answer) for answer in pickled]
    for answer in answers:
        if answer.error:
            raise WeightPlanError(f"engine {engine} cannot load the trainer's tensors: {answer.error}")
    needs = [answer.needs for answer in answers]
    unknown = [meta.name for meta, of_workers in zip(metas, zip(*needs, strict=True), strict=True)
               if all(need is None for need in of_workers)]  # fmt: skip
    forgotten = sorted({name for answer in answers for name in answer.forgotten})
    if unknown:
        raise WeightPlanError(f"engine {engine} has no place for {listed(unknown)} of the trainer")
    if forgotten:
        raise WeightPlanError(f"the trainer's tensors do not cover {listed(forgotten)} of engine {engine}")
    return needs
