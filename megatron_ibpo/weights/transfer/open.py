"""A transport by its name."""

from __future__ import annotations

from megatron_ibpo.weights.transfer.order import TransportName
from megatron_ibpo.weights.transfer.update import Transport
from megatron_ibpo.world import World

__all__ = ["open_transport"]


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
