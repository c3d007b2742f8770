import importlib.util
import math
import time

import torch
import vllm_stand_in
from job import TIMEOUT_S, beside, check
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from training import set_up, start_policy

from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.weights.transfer.link import UpdateOrder
from megatron_ibpo.weights.transfer.wire import checksum


def run(job):
    _, config, sequences = set_up(job, "qwen3")
    policy, rank = start_policy(config)
    stands_in = not job.on_gpu or importlib.util.find_spec("vllm") is None
    if stands_in:
        vllm_stand_in.install()
    with beside(Worker) as link:

        def send(version, check_sums):
            """Seconds of an update, the sum of what came, and waits; checks that the same was sent."""
            order = UpdateOrder(version, sleeping=False, check=check_sums, timeout=TIMEOUT_S)
            started = time.perf_counter()
            sent = rank.send({0: link}, [0], order)
            seconds = time.perf_counter() - started
            check(sent.failures == {}, f"the update failed: {sent.failures}")
            return seconds, link.ask("sum"), sent.waits

        rank.open_transport(TRANSPORTS["ipc"])
        check(rank.connect({0: link}, [0]) == {}, "the stand-in refused to connect")
        first, before, _ = send(1, check_sums=True)
        policy.update(sequences)
        seconds, _, waits = send(2, check_sums=False)
        checked, after, _ = send(3, check_sums=True)
        size = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in rank.export.metadata())
        job.note(
            sender="a stand-in for vLLM's" if stands_in else "vLLM's", bytes=size, first_seconds=first,
            update_seconds=seconds, checked_seconds=checked, bytes_per_second=size / seconds,
            waits=waits[0], wait_seconds=waits[1],
            summary=f"{size / 1e9:.2f} GB in {seconds:.2f} s, {size / seconds / 1e9:.1f} GB/s",
        )  # fmt: skip
        check(before != after, "the last update brought the weights of the first")


class Worker:
    def __init__(self):
        self._weights, self._buffer = {}, None  # the sender has one buffer, opened once an update

    def init_weight_transfer(self, info):
        assert info["packed"]

    def start_weight_update(self, check):
        self._came, self._checked = set(), check

    def update_weights(self, info):
        info = info if isinstance(info, dict) else vars(info)
        if self._buffer is None:
            handle = info["ipc_handles"]
            if isinstance(handle, dict):  # vLLM's: arguments by the GPU's UUID
                handle = rebuild_cuda_tensor, *handle.values()
            rebuild, arguments = handle
            self._buffer = rebuild(*arguments)
        start, columns = 0, [info[name] for name in ("names", "dtype_names", "shapes", "tensor_sizes")]
        for name, dtype, shape, size in zip(*columns, strict=True):
            part = self._buffer[start : start + size].view(getattr(torch, dtype)).view(shape)
            self._weights[name] = part.clone()
            self._came.add(name)
            start += size
        if self._buffer.is_cuda:
            torch.cuda.synchronize()

    def missing_weights(self):
        return [sorted(self._weights.keys() - self._came)]

    def finish_weight_update(self, version):
        self._buffer = None
        return [{name: checksum(tensor) for name, tensor in self._weights.items()} if self._checked else {}]

    def sum(self):
        return sum(tensor.double().sum().item() for tensor in self._weights.values())
