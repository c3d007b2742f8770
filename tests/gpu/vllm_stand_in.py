"""vLLM 0.32's sender of packed buffers by memory handles, for machines without vLLM."""

import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """Iterates over (name, tensor)."""


@dataclass
class IPCTrainerInitInfo:
    rank: int
    packed: bool
    packed_buffer_size_bytes: int


class IPCTrainerWeightTransferEngine:
    """Copies tensors into one buffer that the other side has opened; full, it waits for the other side."""

    def __init__(self, info: IPCTrainerInitInfo, client: Any, source: Any) -> None:
        assert info.packed, "as our transport has it"
        self._info, self._client, self._source = info, client, source

    @classmethod
    def trainer_init(cls, init_info: IPCTrainerInitInfo, *, client: Any, source: Any) -> Any:
        return cls(init_info, client, source)

    def send_weights(self) -> None:
        self._client.start_weight_update()
        buffer, handle, chunk, used = None, None, new_chunk(), 0
        for name, tensor in self._source:
            if buffer is None:
                size = self._info.packed_buffer_size_bytes
                buffer = torch.empty(size, dtype=torch.uint8, device=tensor.device)
                handle = reduce_tensor(buffer)
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            if used and used + flat.numel() > len(buffer):
                self._ship(chunk, handle)
                chunk, used = new_chunk(), 0
            buffer[used : used + flat.numel()].copy_(flat)
            used += flat.numel()
            chunk["names"].append(name)
            chunk["dtype_names"].append(str(tensor.dtype).removeprefix("torch."))
            chunk["shapes"].append(list(tensor.shape))
            chunk["tensor_sizes"].append(flat.numel())
        if used:
            self._ship(chunk, handle)
        self._client.finish_weight_update()

    def _ship(self, chunk: dict[str, Any], handle: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._client.update_weights(chunk | {"ipc_handles": handle})


def new_chunk() -> dict[str, Any]:
    return {"names": [], "dtype_names": [], "shapes": [], "tensor_sizes": []}


class Absent:
    """A class of vLLM's that the ipc transport does not use."""


MODULES: dict[str, tuple[Any, ...]] = {
    "base": (ParamMeta, WeightSource), "ipc_engine": (IPCTrainerInitInfo, IPCTrainerWeightTransferEngine),
    "nccl_common": (), "nccl_engine": (),
}  # fmt: skip


def install() -> None:
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        _module(name).__path__ = []
    for name, members in MODULES.items():
        module = _module(f"vllm.distributed.weight_transfer.{name}")
        vars(module).update({member.__name__: member for member in members}, __getattr__=_absent)


def _module(name: str) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def _absent(name: str) -> type:
    if name.startswith("_"):
        raise AttributeError(name)
    return Absent
