"""Weights from the trainers to running engines: gloo on CPUs, nccl or ipc on GPUs."""

from __future__ import annotations

from typing import Literal

from megatron_ibpo.weights.transfer.checksum import WeightMismatchError
from megatron_ibpo.weights.transfer.link import EngineLink, Failures, Sent
from megatron_ibpo.weights.transfer.update import Order, Transport, update_engines
from megatron_ibpo.weights.transfer.wire import WeightPlanError
from megatron_ibpo.world import World

__all__ = [
    "EngineLink",
    "Failures",
    "Order",
    "Sent",
    "Transport",
    "TransportName",
    "WeightMismatchError",
    "WeightPlanError",
    "choose_transport",
    "open_transport",
    "update_engines",
]

TransportName = Literal["gloo", "ipc", "nccl"]


def choose_transport(*, on_gpu: bool, colocate: bool) -> TransportName:
    """gloo on CPUs; on GPUs ipc where engines share the trainers' and nccl where they do not."""
    if not on_gpu:
        return "gloo"
    return "ipc" if colocate else "nccl"


def open_transport(
    name: TransportName,
    world: World,
    *,
    num_engines: int,
    workers_per_engine: int,
    bucket_bytes: int,
    timeout: float,
) -> Transport:
    """The trainers' side of transport `name`, not yet connected. Only nccl and ipc import vLLM.

    Args:
        bucket_bytes: at most twice so much memory is used beside the model.
        timeout: seconds that a step of an update may take.
    """
    if name == "gloo":
        from megatron_ibpo.weights.transfer.gloo import GlooTransport

        return GlooTransport(world, workers_per_engine, bucket_bytes, timeout)
    from megatron_ibpo.weights.transfer.cuda import IpcTransport, NcclTransport

    if name == "nccl":
        return NcclTransport(world, num_engines, workers_per_engine, bucket_bytes, timeout)
    return IpcTransport(world, workers_per_engine, bucket_bytes, timeout)
