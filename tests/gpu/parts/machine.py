import subprocess

import torch

from megatron_ibpo.basics.versions import differences, installed_versions, machine

LIBRARIES = ("fla-core", "liger-kernel", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")


def run(job):
    job.note(versions=machine(*LIBRARIES), differs_from_tested=differences(installed_versions()))
    if not job.on_gpu:
        job.note(summary="a CPU: no speed is measured")
        return
    from bench_loss import ceilings

    properties = torch.cuda.get_device_properties(0)
    job.note(
        gpus=torch.cuda.device_count(), gpu=properties.name,
        capability=list(torch.cuda.get_device_capability(0)), memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count, cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(), nccl=list(torch.cuda.nccl.version()),
    )  # fmt: skip
    asked = "command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    said = subprocess.run(asked, shell=True, capture_output=True, text=True, timeout=30).stdout
    job.note(driver=said.partition("\n")[0].strip())
    rates = ceilings()
    copied, multiplied = rates["copy_bytes_per_s"] / 1e12, rates["matmul_flops_per_s"] / 1e12
    job.note(**rates, summary=f"{properties.name}, {copied:.2f} TB/s copied, {multiplied:.0f} TFLOP/s bf16")
