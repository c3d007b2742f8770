"""NCCL (gloo), CUDA's memory handles (files) and streams on a CPU: what vLLM's transports use of them."""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

GPU = "STAND_IN_GPU"  # environment variable: which GPU a trainer and its engine share
DIE_AT = "STAND_IN_DIES_AT"
"""Environment variable: the process ends when it is to receive its so many-th tensor, or with AT_MEETING when
it is to join a group."""
AT_MEETING = -1
RELEASED: list[bytes] = []
"""Memory that this process lent and took back, since no other process had opened it."""


class Communicator:
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


class SharedMemory:
    """`torch` as vLLM's packed transfer sees it: GPU memory lies in files, by whose names others find it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._files: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, size: int, *, dtype: Any, device: Any) -> Any:
        if device != "cuda":
            return self._torch.empty(size, dtype=dtype, device=device)
        handle, path = tempfile.mkstemp(dir="/dev/shm")
        os.close(handle)
        tensor = self._torch.from_file(path, shared=True, size=size, dtype=dtype)
        self._files[tensor.data_ptr()] = path
        weakref.finalize(tensor, os.unlink, path)
        return tensor

    def handle(self, tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        """Stand in for `reduce_tensor`; the seventh is the device's number, which the receiver sets, the last
        two say where it is counted who has the memory."""
        path = self._files[tensor.data_ptr()]
        return None, (path, len(tensor), tensor.dtype, None, None, None, 0, *[None] * 4, path.encode(), 0)

    def opened(self, path: str, size: int, dtype: Any, *_: Any) -> Any:
        return self._torch.from_file(path, shared=True, size=size, dtype=dtype)


class Stream:
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
    import torch
    from torch.multiprocessing import reductions
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    def released(path: bytes, offset: int) -> None:
        RELEASED.append(path)

    memory = SharedMemory(torch)
    packed_tensor.torch = memory
    packed_tensor.reduce_tensor = memory.handle
    reductions.rebuild_cuda_tensor = memory.opened
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=os.environ[GPU])
    torch.UntypedStorage._release_ipc_counter_cuda = released
    torch.cuda.ipc_collect = torch.cuda.synchronize = lambda *_: None
    pynccl.PyNcclCommunicator = Communicator  # type: ignore[misc]
    torch.cuda.Stream = Stream  # type: ignore[misc]
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = nothing
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.device_index = nothing  # type: ignore[misc]
    torch.Tensor.record_stream = lambda *_: None
