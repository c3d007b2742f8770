"""Gathering of a sharded optimizer's state in main memory for a checkpoint.

This replaces Megatron's `DistributedOptimizer.get_parameter_state_dp_zero`, with the same result. Megatron's
holds all kinds of state of a bucket beside the whole at once, and most buffers are a single bucket. So the
first data-parallel rank needs 24 bytes per parameter and 12 per parameter of its own shard. Here one kind
comes after the other: 16, and 4 for the shard.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def gathered_by_kind() -> AbstractContextManager[Any]:
    """Make Megatron gather a sharded optimizer's state with this module, within the context."""
    return mock.patch.object(DistributedOptimizer, "get_parameter_state_dp_zero", _gather)


def _gather(optimizer: Any, **_: Any) -> dict[Any, Any] | None:
    """Return Megatron's dictionary on the first rank of the data-parallel group, None on the others.
    Collective."""
    kinds = ("param", *optimizer.optimizer_state_keys)
    group = optimizer.data_parallel_group_gloo
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges_by_dtype in enumerate(optimizer.gbuf_ranges):
        ((dtype, ranges),) = ranges_by_dtype.items()
        buffer = optimizer.buffers[index]
        # reused for every bucket and kind: gloo's threads hold gathered data a little longer than the gather
        # takes, so fresh memory for each would exist twice
        elements = max(bucket.grad_data.numel() for bucket in buffer.buckets)
        scratch = _on_host(elements // group.size()), _on_host(elements) if group.rank() == 0 else None
        state[index] = {
            dtype: {kind: _gathered_state(optimizer, buffer, ranges, kind, *scratch) for kind in kinds}
        }
        state[index][dtype]["numel_unpadded"] = buffer.numel_unpadded
    return state if group.rank() == 0 else None


def _gathered_state(
    optimizer: Any, buffer: Any, ranges: Sequence[Any], kind: str, shard_memory: Tensor, memory: Tensor | None
) -> Tensor | None:
    """Return one kind of state of all parameters in a buffer, float32 [elements without padding]; None except
    on the first rank.

    Args:
        ranges: by bucket: the part of each parameter that is this rank's.
        shard_memory, memory: room for this rank's shard of the largest bucket, and on the first rank for all
            of it.
    """
    group = optimizer.data_parallel_group_gloo
    gathered = None if memory is None else _on_host(buffer.numel_unpadded)
    start, first_rank = 0, dist.get_global_rank(group, 0)
    for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
        size, end = bucket.numel_unpadded, start + bucket.numel_unpadded
        shard = shard_memory[: bucket.grad_data.numel() // group.size()].zero_()
        for parameter, places in bucket_ranges["param_map"].items():
            place = places["gbuf_local"]
            state = optimizer._get_main_param_and_optimizer_states(parameter)[kind]
            shard[place.start : place.end].copy_(state.detach())
        if gathered is None or memory is None:
            dist.gather(shard, None, first_rank, group)
        else:
            shards = memory[: len(shard) * group.size()].chunk(group.size())
            dist.gather(shard, list(shards), first_rank, group)
            gathered[start:end].copy_(memory[:size])
        start = end
    return gathered


def _on_host(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device="cpu")
