"""NCCL and CUDA's streams on a CPU: what vLLM's transport over NCCL uses of them, which takes two GPUs.

    install()       # in a trainer rank; engines do it through engine_stand_ins/sitecustomize.py

NCCL is gloo: values arrive, and waiting for a member that is gone lasts until the group is aborted, as
there. (Memory handles run on one GPU: tests/gpu/parts/weight_update.py.)
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Any

DIE_AT = "STAND_IN_DIES_AT"
"""Environment variable: the process ends when it is to receive its so many-th tensor, or with AT_MEETING when
it is to join a group."""
AT_MEETING = -1


class Communicator:
    """As vLLM's PyNcclCommunicator."""

    def __init__(self, group: Any, device: Any) -> None:
        import torch
        import torch.distributed as dist

        from megatron_ibpo.weights.transfer.gloo import open_group

        self.rank, self.world_size = group.rank, group.world_size
        self.device = torch.device("cpu", 0)
        self.disabled = False
        self.nccl, self.comm = self, self
        self._aborted = False
        self._left = int(os.environ.get(DIE_AT, 0))
        if self._left == AT_MEETING:
            os._exit(9)
        self._group = open_group(dist.PrefixStore("nccl", group.store), self.rank, self.world_size)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        if self.disabled:
            return
        import torch.distributed as dist

        if self._left == 1:
            os._exit(9)
        self._left -= 1
        options = dist.BroadcastOptions()
        options.rootRank = src
        work = self._group.broadcast([tensor], options)
        while not work.is_completed() and not self._aborted:
            time.sleep(0.001)

    def ncclCommAbort(self, comm: Communicator) -> None:
        self._aborted = True


class Stream:
    """Nothing is ever under way."""

    device = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass


@contextmanager
def nothing(*_: Any) -> Any:
    yield


def install() -> None:
    """Put the stand-ins in their places."""
    import torch
    from vllm.distributed.device_communicators import pynccl

    torch.cuda.synchronize = lambda *_: None
    pynccl.PyNcclCommunicator = Communicator  # type: ignore[misc]
    torch.cuda.Stream = Stream  # type: ignore[misc]
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = nothing
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.device_index = nothing  # type: ignore[misc]
    torch.Tensor.record_stream = lambda *_: None
