import time

import torch
from job import Skipped, check


def run(job):
    if not job.on_gpu:
        raise Skipped("memory is pinned for a CUDA device")
    size = 2**32 if job.is_large else 2**30
    torch.zeros(1, device="cuda")  # a context
    host = torch.zeros(size, dtype=torch.uint8)
    started = time.perf_counter()
    error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
    job.note(bytes=size, register_seconds=time.perf_counter() - started, error=error)
    check(error == 0, f"cudaHostRegister gave error {error}: no memory is pinned here, and so sleep fails")
    try:
        check(host.is_pinned(), "torch does not see that the memory is pinned")
        on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
        to, back = rate(on_gpu, host), rate(host, on_gpu)
    finally:
        torch.cuda.synchronize()
        error = int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr()))
    check(error == 0, f"cudaHostUnregister gave error {error}")
    said = f"{size / 2**30:.0f} GiB pinned, {to / 1e9:.1f} GB/s to the GPU, {back / 1e9:.1f} GB/s from it"
    job.note(to_gpu_bytes_per_s=to, from_gpu_bytes_per_s=back, summary=said)


def rate(target, source):
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return len(source) / min(seconds)
