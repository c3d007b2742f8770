"""Weight updates of another process on the same GPU, through our ipc transport: checksums and GB/s."""

import importlib.util
import math
import time
from typing import Any

import torch
import vllm_stand_in
from job import Job, check
from processes import PipeLink, beside
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from training import set_up, start_policy

from megatron_ibpo.weights.transfer.update_order import UpdateOrder
from megatron_ibpo.weights.transfer.wire import checksum

TIMEOUT_S = 60.0  # of a step of an update


def run(job: Job) -> None:
    _, config, sequences = set_up(job, "qwen3")
    policy, ranks = start_policy(config)
    stands_in = not job.on_gpu or importlib.util.find_spec("vllm") is None
    if stands_in:
        vllm_stand_in.install()
    with beside(Worker) as link:
        rank = ranks.rank
        rank.open_transport("ipc")
        check(rank.connect({0: link}, [0]) == {}, "the stand-in refused to connect")
        before = send(rank, link, version=1, check_sums=True)
        policy.update(sequences)
        plain = send(rank, link, version=2, check_sums=False)
        checked = send(rank, link, version=3, check_sums=True)
        size = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in rank.export.metadata())
        seconds = plain["seconds"]
        job.note(
            sender="a stand-in for vLLM's" if stands_in else "vLLM's", bytes=size,
            first_seconds=before["seconds"], update_seconds=seconds, checked_seconds=checked["seconds"],
            bytes_per_second=size / seconds,
            summary=f"{size / 1e9:.2f} GB in {seconds:.2f} s, {size / seconds / 1e9:.1f} GB/s",
        )  # fmt: skip
        check(before["sum"] != checked["sum"], "the last update brought the weights of the first")


def send(rank: Any, link: PipeLink, *, version: int, check_sums: bool) -> dict[str, Any]:
    """One update; with `check_sums`, `update_engines` raises where something else came than was sent."""
    order = UpdateOrder(version, sleeping=False, check=check_sums, timeout=TIMEOUT_S)
    started = time.perf_counter()
    sent = rank.send({0: link}, [0], order)
    seconds = time.perf_counter() - started
    check(sent.failures == {}, f"the update failed: {sent.failures}")
    return {"seconds": seconds, "sum": link.ask("sum")}


class Worker:
    def __init__(self) -> None:
        self._weights: dict[str, torch.Tensor] = {}
        self._buffer: Any = None  # opened once an update

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        assert info["packed"]

    def start_weight_update(self, check: bool) -> None:
        self._came, self._checked = set(), check

    def update_weights(self, info: Any) -> None:
        info = info if isinstance(info, dict) else vars(info)
        buffer, start = self._open(info["ipc_handles"]), 0
        columns = [info[name] for name in ("names", "dtype_names", "shapes", "tensor_sizes")]
        for name, dtype, shape, size in zip(*columns, strict=True):
            part = buffer[start : start + size].view(getattr(torch, dtype)).view(shape)
            self._weights[name] = part.clone()
            self._came.add(name)
            start += size
        if buffer.is_cuda:
            torch.cuda.synchronize()

    def missing_weights(self) -> list[list[str]]:
        return [sorted(self._weights.keys() - self._came)]

    def finish_weight_update(self, version: int) -> list[dict[str, int]]:
        self._buffer = None
        return [{name: checksum(tensor) for name, tensor in self._weights.items()} if self._checked else {}]

    def sum(self) -> float:
        return sum(tensor.double().sum().item() for tensor in self._weights.values())

    def _open(self, handle: Any) -> torch.Tensor:
        """The sender has one buffer. vLLM's handles are arguments by the GPU's UUID."""
        if self._buffer is None:
            if isinstance(handle, dict):
                handle = rebuild_cuda_tensor, *handle.values()
            rebuild, arguments = handle
            self._buffer = rebuild(*arguments)
        return self._buffer
