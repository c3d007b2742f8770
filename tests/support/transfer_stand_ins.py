"""NCCL (gloo), CUDA's memory handles (files) and streams on a CPU: what vLLM's transports use of them."""

import inspect
import os
import tempfile
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist

GPU = "STAND_IN_GPU"  # environment variable: which GPU a trainer and its engine share
DIE_AT = "STAND_IN_DIES_AT"  # environment variable: the process ends at its so many-th tensor
AT_MEETING = -1  # or when it is to join a group
RELEASED: list[bytes] = []  # memory that was lent and taken back, since no other process had opened it


class Communicator:
    def __init__(self, group, device):
        from megatron_ibpo.weights.transfer.gloo import open_group

        self.rank, self.world_size = group.rank, group.world_size
        self.device = torch.device("cpu", 0)
        self.disabled = self._aborted = False
        self.nccl = self.comm = self
        self._left = int(os.environ.get(DIE_AT, 0))
        if self._left == AT_MEETING:
            os._exit(9)
        self._group = open_group(dist.PrefixStore("nccl", group.store), self.rank, self.world_size)

    def broadcast(self, tensor, src, stream=None):
        if self.disabled:
            return
        if self._left == 1:
            os._exit(9)
        self._left -= 1
        options = dist.BroadcastOptions()
        options.rootRank = src
        work = self._group.broadcast([tensor], options)
        while not work.is_completed() and not self._aborted:
            time.sleep(0.001)

    def ncclCommAbort(self, comm):
        self._aborted = True


class SharedMemory:
    """`torch` as vLLM's packed transfer sees it: GPU memory lies in files, by whose names others find it."""

    def __init__(self):
        self._files = {}

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, size, *, dtype, device):
        if device != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        handle, path = tempfile.mkstemp(dir="/dev/shm")
        os.close(handle)
        tensor = torch.from_file(path, shared=True, size=size, dtype=dtype)
        self._files[tensor.data_ptr()] = path
        weakref.finalize(tensor, os.unlink, path)
        return tensor

    def reduce_tensor(self, tensor):
        # the seventh is the device's number, which the receiver sets; the last two say who has the memory
        path = self._files[tensor.data_ptr()]
        return None, (path, len(tensor), tensor.dtype, None, None, None, 0, *[None] * 4, path.encode(), 0)


class Stream:
    """Nothing is ever under way."""

    device = None
    synchronize = record_event = wait_event = wait_stream = lambda *_: None

    def __init__(self, *_, **__):
        pass


def rebuild_cuda_tensor(path, size, dtype, *_):
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


def install():
    from torch.multiprocessing import reductions
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    # torch's arguments have the use count in these places
    rebuild_cuda_tensor.__signature__ = inspect.signature(reductions.rebuild_cuda_tensor)  # type: ignore
    packed_tensor.torch = memory = SharedMemory()
    packed_tensor.reduce_tensor = memory.reduce_tensor
    reductions.rebuild_cuda_tensor = rebuild_cuda_tensor
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=os.environ[GPU])
    torch.UntypedStorage._release_ipc_counter_cuda = lambda path, _: RELEASED.append(path)  # type: ignore[misc]
    torch.cuda.ipc_collect = torch.cuda.synchronize = lambda *_: None
    pynccl.PyNcclCommunicator = Communicator  # type: ignore[misc]
    torch.cuda.Stream = Stream  # type: ignore[misc]
    torch.cuda.current_stream = Stream
    torch.cuda.stream = torch.accelerator.device_index = nullcontext  # type: ignore[misc]
    torch.accelerator.current_device_index = lambda: 0
    torch.Tensor.record_stream = lambda *_: None
