"""Check that the nodes of a cluster have the main memory that a run will hold there, before any of it is
taken.

Counted are the parts present in every run: the state of trainers and engines between steps, a checkpoint
while it is written, and the least that the programs take. Activations of trainers on CPUs, data and Ray's
object store come on top, so a run that passes may still lack memory.
"""

from collections import Counter
from collections.abc import Mapping

from megatron_ibpo.basics.text import listed
from megatron_ibpo.cluster.placement import Engines, Node, Placement, plan_placement
from megatron_ibpo.config import Config
from megatron_ibpo.engines.registry import engine_needs
from megatron_ibpo.models import ModelShape
from megatron_ibpo.plan.memory import GIB, MOVED_OUT, engine_memory, node_memory, rank_state
from megatron_ibpo.plan.parameter_count import Census, take_census
from megatron_ibpo.policy.overrides import read_overrides

TRAINER_PROGRAM_BYTES = int(0.4 * GIB)
"""Bytes of a trainer's process without its model: 406 MiB with a tiny one (`tests/soak.sh`)."""
ENGINE_PROGRAM_BYTES = int(0.5 * GIB)
"""Bytes of an engine's process on a CPU: measured 1,104 MiB, including a KV cache of 512 MiB."""
_MOST_NODES = 8
"""Most nodes that a message names."""

_TRAINERS = "weights, gradients and optimizer state of the trainers"
_ENGINES = "weights and KV caches of the engines"
_PROGRAMS = "the programs"
_ADVICE = {
    MOVED_OUT: "--no-offload-train leaves trainers' state on the GPUs",
    "a checkpoint being written": "without --use-distributed-optimizer none is gathered on one rank",
    "the reference policy": "--kl-coef 0 needs no reference policy",
    "the optimizer": "--no-optimizer-cpu-offload keeps the optimizer's state on the GPUs",
    _TRAINERS: "a smaller --num-trainers, --use-distributed-optimizer",
    _ENGINES: "a smaller {kv_cache_flag} or --rollout-num-gpus",
    _PROGRAMS: "a smaller --num-trainers",
}
"""Largest part → advice for reducing it."""


def check_main_memory(
    config: Config, shape: ModelShape, placement: Placement, memory: Mapping[int, int]
) -> None:
    """Refuse a run that holds more in main memory than a node has.

    Args:
        config: configuration with all device-dependent settings resolved.
        memory: node with trainers or engines, by its index in the placement → its bytes.

    Raises:
        ValueError: for each node with too little memory: the needs, what it has, and what to change.
    """
    census = take_census(shape, config, len(placement.trainers))
    kv_cache_flag = engine_needs(config, on_gpu=placement.on_gpu).kv_cache_flag
    problems = [
        _refusal(placement.nodes[node].address, memory[node], parts, kv_cache_flag)
        for node, parts in _needed(config, shape, census, placement).items()
        if sum(parts.values()) > memory[node]
    ]
    if problems:
        raise ValueError(listed(problems, "\n", most=_MOST_NODES))


def memory_on_cpus(config: Config, shape: ModelShape, census: Census) -> dict[str, int]:
    """Return the bytes of main memory, by purpose, that a run holds on one machine without GPUs.

    Args:
        config: configuration with device-dependent settings resolved for CPUs.

    Raises:
        PlacementError: the processes do not make whole engines.
    """
    rollout, ranks = config.rollout, census.world_size
    engines = Engines(rollout.rollout_num_gpus_per_engine, rollout.colocate, rollout.rollout_num_gpus)
    processes = 2 * ranks + (rollout.rollout_num_gpus or 0)  # as many as the run's own Ray counts
    machine = Node("here", "here", cpus=processes, gpus=0)
    placement = plan_placement([machine], num_trainers=ranks, engines=engines, on_gpu=False)
    (parts,) = _needed(config, shape, census, placement).values()
    return parts


def _refusal(address: str, memory_bytes: int, parts: Mapping[str, int], kv_cache_flag: str) -> str:
    largest = max(parts, key=lambda name: parts[name])
    advice = _ADVICE[largest].format(kv_cache_flag=kv_cache_flag)
    named = "; ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return (
        f"{address} has {memory_bytes / GIB:.1f} GiB of main memory, and this run needs at least "
        f"{sum(parts.values()) / GIB:.1f} there ({named}): {advice}; or use nodes with more of "
        "it, or more nodes with fewer ranks on each"
    )


def _needed(
    config: Config, shape: ModelShape, census: Census, placement: Placement
) -> dict[int, dict[str, int]]:
    """Return, for each node with any of the run's processes, the bytes by purpose."""
    ranks: dict[int, list[int]] = {}
    for rank, slot in enumerate(placement.trainers):
        ranks.setdefault(slot.node, []).append(rank)
    engines = Counter(slot.node for slot in placement.engines)
    on_gpu, overrides = placement.on_gpu, read_overrides(config)
    stages = [rank_state(config, overrides, part, census) for part in census.stages]
    engine = engine_memory(shape, config, engine_needs(config, on_gpu=on_gpu), census, gpu_bytes=0)
    engine_bytes = config.rollout.rollout_num_gpus_per_engine * (engine.weights + engine.kv_cache)
    needed = {}
    for node in sorted({*ranks, *engines}):
        node_ranks = ranks.get(node, [])
        parts = node_memory(config, census, stages, node_ranks)
        if not on_gpu:
            # trainers hold here what they would hold on GPUs, and nothing moves out
            states = [stages[census.place(rank).pipeline].state for rank in node_ranks]
            parts |= {MOVED_OUT: 0, _TRAINERS: sum(states)}
            parts[_ENGINES] = engines[node] * engine_bytes
        # the program of an engine with GPUs has never been measured
        programs = len(node_ranks) * TRAINER_PROGRAM_BYTES
        programs += 0 if on_gpu else engines[node] * ENGINE_PROGRAM_BYTES
        needed[node] = parts | {_PROGRAMS: programs}
    return needed
