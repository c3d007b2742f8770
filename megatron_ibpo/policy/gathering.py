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
        scratch = _Scratch(max(bucket.grad_data.numel() for bucket in buffer.buckets), group)
        state[index] = {
            dtype: {kind: _gathered_state(optimizer, buffer, ranges, kind, scratch) for kind in kinds}
        }
        state[index][dtype]["numel_unpadded"] = buffer.numel_unpadded
    return state if group.rank() == 0 else None


class _Scratch:
    """Memory for the largest bucket, reused for every bucket and kind. gloo's threads hold gathered data a
    little longer than the gather takes, so fresh memory for each would exist twice."""

    def __init__(self, elements: int, group: dist.ProcessGroup) -> None:
        self._group = group
        self._shard = _on_host(elements // group.size())
        self._arrived = _on_host(elements) if group.rank() == 0 else None

    def shard(self, size: int) -> Tensor:
        """Return zeros [size]."""
        return self._shard[:size].zero_()

    def brought_together(self, shard: Tensor) -> Tensor | None:
        """Gather all ranks' shards, one after another, on the first rank. The result is valid until the next
        call."""
        first = dist.get_global_rank(self._group, 0)
        if self._arrived is None:
            dist.gather(shard, None, first, self._group)
            return None
        arrived = self._arrived[: len(shard) * self._group.size()]
        dist.gather(shard, list(arrived.chunk(self._group.size())), first, self._group)
        return arrived


def _gathered_state(
    optimizer: Any, buffer: Any, ranges: Sequence[Any], kind: str, scratch: _Scratch
) -> Tensor | None:
    """Return one kind of state of all parameters in a buffer, float32 [elements without padding]; None except
    on the first rank.

    Args:
        ranges: by bucket: the part of each parameter that is this rank's.
    """
    group = optimizer.data_parallel_group_gloo
    gathered = _on_host(buffer.numel_unpadded) if group.rank() == 0 else None
    start = 0
    for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
        size, end = bucket.numel_unpadded, start + bucket.numel_unpadded
        shard = scratch.shard(bucket.grad_data.numel() // group.size())
        for parameter, places in bucket_ranges["param_map"].items():
            place = places["gbuf_local"]
            state = optimizer._get_main_param_and_optimizer_states(parameter)[kind]
            shard[place.start : place.end].copy_(state.detach())
        arrived = scratch.brought_together(shard)
        if gathered is not None and arrived is not None:
            gathered[start:end].copy_(arrived[:size])
        start = end
    return gathered


def _on_host(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device="cpu")
