"""Main memory: what the plan counts beside what the processes hold."""

import os
from collections.abc import Iterator

import psutil
import torch

from megatron_ibpo.models.lora import TrainedWeights, adapter_entries
from megatron_ibpo.plan.memory import GIB
from megatron_ibpo.plan.node_memory import memory_on_cpus
from megatron_ibpo.plan.parameter_count import census_by_names
from megatron_ibpo.policy.overrides import read_overrides
from megatron_ibpo.run.state import Run
from megatron_ibpo.verify.rows import NotCheckedError, Row, measured
from megatron_ibpo.weights.formats.hugging_face import trained_elements

BOUND = 2.0
"""Activations, libraries and their threads come on top of what is counted (`plan.node_memory`)."""


def check_memory(run: Run) -> Iterator[Row]:
    """Compare the sum over trainers and engines."""
    if torch.cuda.is_available():
        raise NotCheckedError("on GPUs: metrics.jsonl has the peak of each rank, `ibpo plan` the prediction")
    used = sum(_bytes_held().values())
    if not used:
        raise NotCheckedError("trainer and engine are this process, which does much else")
    config, shape = run.config, run.foundation.shape
    elements = trained_elements(run.foundation.hf_dir, shape)
    weights = TrainedWeights(elements, adapter_entries(config.model, shape))
    ranks = config.cluster.num_trainers or 1
    census = census_by_names(shape, config, read_overrides(config).chunks, weights, ranks)
    planned = sum(memory_on_cpus(config, shape, census).values())
    yield measured(
        "memory: main", used / planned, BOUND, "activations and libraries come on top",
        f"{used / GIB:.2f} GiB held by trainers and engines, {planned / GIB:.2f} planned", "ibpo plan",
    )  # fmt: skip


def _bytes_held() -> dict[int, int]:
    """Return the bytes that each trainer, each engine, and the processes that these started hold alone."""
    actors = [p for p in psutil.Process(os.getpid()).children(recursive=True) if _is_actor(p)]
    processes = {p.pid: p for actor in actors for p in (actor, *actor.children(recursive=True))}
    return {pid: process.memory_full_info().uss for pid, process in processes.items() if process.is_running()}


def _is_actor(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith("ray::_Process")
    except psutil.Error:
        return False
