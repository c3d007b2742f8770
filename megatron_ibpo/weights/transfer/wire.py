"""The plan of a weight update as plain lists: what vLLM passes on to its workers, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ibpo.weights.layout.regions import Buckets, Need, Sender, plan_buckets
from megatron_ibpo.weights.layout.weight_source import Box, TensorMeta
from megatron_ibpo.weights.transfer.errors import WeightPlanError

__all__ = ["WirePlan", "decode_metas", "encode_answer", "encode_metas", "read_answers"]

SHOWN = 5
"""Names listed in an error before it only counts."""


@dataclass(frozen=True)
class WirePlan:
    """What a worker must know to receive."""

    metas: list[TensorMeta]
    senders: Sequence[tuple[Sender, ...]]
    """Of each tensor: (rank in the group, region)."""
    bucket_bytes: int

    @property
    def buckets(self) -> Buckets:
        return plan_buckets(self.metas, self.bucket_bytes)

    def encode(self) -> dict[str, Any]:
        return {
            "metas": encode_metas(self.metas),
            "senders": [[[rank, box] for rank, box in senders] for senders in self.senders],
            "bucket_bytes": self.bucket_bytes,
        }

    @classmethod
    def decode(cls, wire: dict[str, Any]) -> WirePlan:
        senders = [tuple((rank, _box(box)) for rank, box in tensor) for tensor in wire["senders"]]
        return cls(decode_metas(wire["metas"]), senders, wire["bucket_bytes"])


def encode_metas(metas: Sequence[TensorMeta]) -> list[Any]:
    return [[meta.name, _dtype_name(meta.dtype), list(meta.shape)] for meta in metas]


def decode_metas(wire: Sequence[Any]) -> list[TensorMeta]:
    return [TensorMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wire]


def encode_answer(
    needs: Sequence[Need | None], forgotten: Sequence[str], error: str | None
) -> dict[str, Any]:
    """A worker's answer to a rehearsal: what it needs of each tensor, the parameters of its model that no
    tensor reached, and why loading failed, if it did."""
    encoded = [None if need is None else [_dtype_name(need.dtype), need.boxes] for need in needs]
    return {"needs": encoded, "forgotten": list(forgotten), "error": error}


def read_answers(
    engine: int, answers: Sequence[dict[str, Any]], metas: Sequence[TensorMeta]
) -> list[list[Need | None]]:
    """The needs of each worker of `engine`.

    Raises:
        WeightPlanError: names the tensors that no worker knows and the parameters that no tensor reaches.
    """
    for answer in answers:
        if answer["error"]:
            raise WeightPlanError(f"engine {engine} cannot load the trainer's tensors: {answer['error']}")
    needs = [[_need(need) for need in answer["needs"]] for answer in answers]
    unknown = [meta.name for meta, of_workers in zip(metas, zip(*needs, strict=True), strict=True)
               if all(need is None for need in of_workers)]  # fmt: skip
    forgotten = sorted({name for answer in answers for name in answer["forgotten"]})
    if unknown:
        raise WeightPlanError(f"engine {engine} has no place for {_listed(unknown)} of the trainer")
    if forgotten:
        raise WeightPlanError(f"the trainer's tensors do not bring {_listed(forgotten)} of engine {engine}")
    return needs


def _need(wire: Any) -> Need | None:
    return None if wire is None else Need(getattr(torch, wire[0]), tuple(_box(box) for box in wire[1]))


def _box(wire: Any) -> Box:
    return tuple((start, stop) for start, stop in wire)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
