"""vLLM 0.32's sender of packed buffers by memory handles, for machines without vLLM."""

import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec

import torch
from torch.multiprocessing.reductions import reduce_tensor


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class IPCTrainerInitInfo:
    rank: int
    packed: bool
    packed_buffer_size_bytes: int


class IPCTrainerWeightTransferEngine:
    """Copies tensors into one buffer that the other side has opened; full, it waits for the other side."""

    def __init__(self, size, client, source):
        self._size, self._client, self._source = size, client, source

    @classmethod
    def trainer_init(cls, init_info, *, client, source):
        assert init_info.packed, "as our transport has it"
        return cls(init_info.packed_buffer_size_bytes, client, source)

    def send_weights(self):
        self._client.start_weight_update()
        buffer, handle, rows, used = None, None, [], 0
        for name, tensor in self._source:
            if buffer is None:
                buffer = torch.empty(self._size, dtype=torch.uint8, device=tensor.device)
                handle = reduce_tensor(buffer)
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            if used and used + flat.numel() > len(buffer):
                self._ship(rows, handle)
                rows, used = [], 0
            buffer[used : used + flat.numel()].copy_(flat)
            used += flat.numel()
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append((name, dtype, list(tensor.shape), flat.numel()))
        if used:
            self._ship(rows, handle)
        self._client.finish_weight_update()

    def _ship(self, rows, handle):
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        names, dtypes, shapes, sizes = zip(*rows, strict=True)
        chunk = {"names": names, "dtype_names": dtypes, "shapes": shapes, "tensor_sizes": sizes}
        self._client.update_weights(chunk | {"ipc_handles": handle})


def absent(name):
    """A class of vLLM's that the ipc transport does not use."""
    if name.startswith("_"):
        raise AttributeError(name)
    return type(name, (), {})


def install():
    own = (ParamMeta, IPCTrainerInitInfo, IPCTrainerWeightTransferEngine)
    packages = ["vllm", "vllm.utils", "vllm.distributed", "vllm.distributed.device_communicators"]
    packages += ["vllm.distributed.weight_transfer"]
    modules = [f"{packages[-1]}.{kind}" for kind in ("base", "ipc_engine", "nccl_common", "nccl_engine")]
    modules += ["vllm.utils.nccl", "vllm.distributed.utils", "vllm.distributed.device_communicators.pynccl"]
    for name in (*packages, *modules):
        module = sys.modules[name] = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        if name in modules:
            vars(module).update({one.__name__: one for one in own}, __getattr__=absent)
