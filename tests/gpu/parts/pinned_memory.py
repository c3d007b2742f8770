"""cudaHostRegister of a few GiB, by which trainers pin what they move off the GPU."""

import time

import torch
from job import Skipped, check

SIZE = 4 * 2**30


def run(job):
    if not job.on_gpu:
        raise Skipped("memory is pinned for a CUDA device")
    size = SIZE if job.is_large else SIZE // 4
    torch.zeros(1, device="cuda")  # a context
    host = torch.zeros(size, dtype=torch.uint8)
    started = time.perf_counter()
    error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
    job.note(bytes=size, register_seconds=time.perf_counter() - started, error=error)
    what = "memory cannot be pinned here, and so sleep fails"
    check(error == 0, f"cudaHostRegister gave error {error}: {what}")
    try:
        check(host.is_pinned(), "torch does not see that the memory is pinned")
        on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
        to, back = rate(on_gpu, host), rate(host, on_gpu)
    finally:
        torch.cuda.synchronize()
        error = int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr()))
    check(error == 0, f"cudaHostUnregister gave error {error}")
    speeds = f"{to / 1e9:.1f} GB/s to the GPU, {back / 1e9:.1f} GB/s from it"
    job.note(to_gpu_bytes_per_s=to, from_gpu_bytes_per_s=back)
    job.note(summary=f"{size / 2**30:.0f} GiB pinned, {speeds}")


def rate(target, source):
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return len(source) / min(seconds)
