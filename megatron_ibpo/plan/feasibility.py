"""Feasibility of a configuration on a cluster, and its needs there, worked out without a GPU; and the check
that the nodes of a cluster have the main memory that a run will hold there, before any of it is taken.

The parameters of a rank of every stage are counted (`parameter_count`), and memory from them (`memory`).
Configurations that training or engines would refuse are refused here, with the reason. Settings of
--model-override that change memory in ways this does not count are named.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ibpo.basics.text import listed
from megatron_ibpo.cluster.placement import Engines, Node, Placement, plan_placement
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.engines.protocol import EngineNeeds
from megatron_ibpo.engines.registry import engine_needs, on_device
from megatron_ibpo.models import ModelShape, check_layout, read_hf_config
from megatron_ibpo.models.cost import COUNTED
from megatron_ibpo.models.layout import context_chunks
from megatron_ibpo.models.lora import check_lora
from megatron_ibpo.plan.memory import (
    GIB,
    MOVED_OUT,
    EngineMemory,
    RankMemory,
    engine_memory,
    host_memory,
    kv_bytes,
    node_memory,
    rank_memory,
    rank_state,
    state_bytes_per_sequence,
    sync_bytes,
)
from megatron_ibpo.plan.parameter_count import Census, take_census
from megatron_ibpo.policy.overrides import Overrides, read_overrides

USABLE_SHARE = 0.97
"""Usable share of a GPU's memory: the driver keeps some, and 80 GB cards offer a little less than 80 GiB."""


@dataclass(frozen=True)
class Misfit:
    """A configuration whose sizes do not fit together, so that no memory can be counted."""

    config: Config
    """As in `Plan`."""
    shape: ModelShape
    world_size: int
    problems: list[str]


@dataclass(frozen=True)
class Plan:
    """A configuration on a cluster. `problems` is empty if it can work as far as this plan can tell."""

    config: Config
    """The configuration with the context length and all device-dependent settings resolved."""
    shape: ModelShape
    overrides: Overrides
    world_size: int
    problems: list[str]
    census: Census
    stages: list[RankMemory]
    """Memory of a rank of each pipeline stage; all its ranks have the same."""
    needs: EngineNeeds
    engine: EngineMemory
    host: dict[str, int]
    """Main memory of the node that needs most: bytes by purpose."""
    placement: Placement


def make_plan(config: Config, world_size: int, shape: ModelShape | None = None) -> Plan | Misfit:
    """Return the plan of a run on `world_size` ranks.

    Args:
        shape: of the model; None: read from its config.json.

    Raises:
        ModelConfigError: there is no usable config.json.
    """
    shape = shape or read_hf_config(config.model.hf_dir)
    context = config.rollout.context_of(shape.max_position_embeddings)
    config = on_device(config, shape, on_gpu=True, max_context=context)
    overrides = read_overrides(config)
    problems = check_layout(shape, config.parallel, world_size, overrides.chunks, config.model.mtp_num_layers)
    if not problems:
        problems += check_lora(config.model, shape, config.parallel, overrides.chunks)
    placement = _placement(config, world_size, problems)
    problems += _engine_problems(shape, config)
    problems += _context_problems(shape, config.rollout, context)
    if problems or placement is None:
        return Misfit(config, shape, world_size, problems)
    census = take_census(shape, config, world_size)
    max_tokens = max(config.model.max_tokens_per_gpu, _share(context, config.parallel.context_parallel_size))
    stages = [rank_memory(shape, config, overrides, part, census, max_tokens) for part in census.stages]
    gpu_bytes = int(config.run.dry_run_gpu_memory_gib * GIB)
    needs = engine_needs(config)
    engine = engine_memory(shape, config, needs, census, gpu_bytes)
    host = host_memory(config, census, stages, ranks_per_node(config, world_size))
    plan = Plan(
        config, shape, overrides, world_size, problems, census, stages, needs, engine, host, placement
    )
    problems += _memory_problems(plan)
    return plan


def _share(tokens: int, ranks: int) -> int:
    """Return the tokens of a sequence on each of the ranks that share it."""
    chunks = context_chunks(ranks)
    return -(-tokens // chunks) * chunks // ranks


def ranks_per_node(config: Config, world_size: int) -> int:
    return min(config.run.dry_run_gpus_per_node, world_size)


def _placement(config: Config, world_size: int, problems: list[str]) -> Placement | None:
    """Place the run on as many nodes like those of the dry run as are needed. If that is impossible, return
    None and add the reason to the problems."""
    rollout, per_node = config.rollout, ranks_per_node(config, world_size)
    if world_size % per_node:
        problems.append(f"--dry-run-gpus-per-node={per_node} does not divide the {world_size} ranks")
        return None
    engine_gpus = 0 if rollout.colocate else rollout.rollout_num_gpus or world_size
    nodes = [
        Node(f"node {index}", f"node {index}", cpus=per_node, gpus=per_node)
        for index in range(-(-world_size // per_node) + -(-engine_gpus // per_node))
    ]
    engines = Engines(rollout.rollout_num_gpus_per_engine, rollout.colocate, rollout.rollout_num_gpus)
    try:
        return plan_placement(nodes, num_trainers=world_size, engines=engines, on_gpu=True)
    except ValueError as error:
        problems.append(str(error))
        return None


# --------------------------------------------------------------------------------------------------- problems


def _engine_problems(shape: ModelShape, config: Config) -> Iterator[str]:
    """Yield the problems for which an engine would refuse to start."""
    size = config.rollout.rollout_num_gpus_per_engine
    flag = f"--rollout-num-gpus-per-engine={size}"
    counts = {**shape.divided_by_tp(), "an expert's hidden size": shape.expert_hidden_size}
    for dimension, count in counts.items():
        if count % size:
            yield f"{flag} does not divide {dimension} ({count})"
    heads = shape.num_key_value_heads
    if heads % size and size % heads:
        yield f"{flag}: an engine can neither divide nor copy {heads} key/value heads evenly over {size} GPUs"


def _context_problems(shape: ModelShape, rollout: RolloutConfig, context: int) -> Iterator[str]:
    if context > shape.max_position_embeddings:
        yield (
            f"--rollout-max-context-len={context} exceeds the model's "
            f"{shape.max_position_embeddings} positions"
        )
    if rollout.rollout_max_response_len >= context:
        yield (
            f"--rollout-max-response-len={rollout.rollout_max_response_len} leaves no room for a prompt in a "
            f"context of {context}"
        )


def _memory_problems(plan: Plan) -> Iterator[str]:
    needs, gpu_bytes = plan.needs, plan.config.run.dry_run_gpu_memory_gib * GIB
    limit = usable_bytes(plan.config)
    by_stage = [peaks(plan, stage) for stage in range(len(plan.stages))]
    advice = {
        "training": "raise --tensor-model-, --pipeline-model- or --context-parallel-size, turn on "
        "--use-distributed-optimizer, --optimizer-cpu-offload (with --use-precision-aware-optimizer) or "
        "--recompute-granularity full, or lower --rollout-max-context-len and --max-tokens-per-gpu",
        "log-probs": "lower --log-probs-max-tokens-per-gpu",
        "saving": "raise --tensor- or --pipeline-model-parallel-size, or turn on --use-distributed-optimizer "
        "or --optimizer-cpu-offload",
        "sampling": f"lower {needs.kv_cache_flag} or {needs.memory_share_flag}, or raise "
        "--rollout-num-gpus-per-engine",
        "weight update": f"lower --update-weight-buffer-size or {needs.kv_cache_flag}",
    }
    for phase, hint in advice.items():
        fullest = max(range(len(by_stage)), key=lambda stage: by_stage[stage][phase])
        peak = by_stage[fullest][phase]
        if peak > limit:
            rank = plan.census.ranks(fullest).start
            yield (
                f"{phase} takes {peak / GIB:.1f} GiB on rank {rank}, of {limit / GIB:.1f} GiB usable on a "
                f"GPU of {plan.config.run.dry_run_gpu_memory_gib:g} GiB: {hint}"
            )
    share = needs.memory_share
    resting = max(memory.resting for memory in plan.stages)  # for an engine that restarts after its death
    if plan.config.rollout.colocate and share * gpu_bytes + resting > gpu_bytes:
        yield (
            f"{needs.memory_share_flag}={share:g}: a starting engine needs that share, "
            f"{share * gpu_bytes / GIB:.1f} GiB, to be free beside the trainer's {resting / GIB:.1f} GiB"
        )
    if full_contexts(plan) < 1:
        yield (
            f"the KV cache of {plan.engine.kv_cache / GIB:.2f} GiB per GPU does not hold one context of "
            f"{plan.config.rollout.rollout_max_context_len} tokens: raise {needs.kv_cache_flag} or "
            f"{needs.memory_share_flag}, or lower --rollout-max-context-len"
        )


def peaks(plan: Plan, stage: int) -> dict[str, int]:
    """Return the bytes in use at the worst moment of each phase, for a rank of a stage.

    If trainer and engine have separate GPUs, the fuller one counts.
    """
    trainer, engine = plan.stages[stage], plan.engine
    _, buffers = sync_bytes(plan.census, plan.config)
    if not plan.config.rollout.colocate:
        return {
            "training": trainer.training,
            "log-probs": trainer.inferring,
            "saving": trainer.resident,
            "weight update": max(trainer.updating + buffers, engine.sampling + engine.loading + buffers),
            "sampling": engine.sampling,
        }
    return {
        "training": trainer.training + engine.asleep,
        "log-probs": trainer.inferring + engine.asleep,
        "saving": trainer.resident + engine.asleep,
        "weight update": trainer.updating + engine.updating + buffers,
        "sampling": trainer.resting + engine.sampling,
    }


class Tightest(NamedTuple):
    """The moment of a step that leaves the least room."""

    phase: str
    rank: int
    used_bytes: int
    free_bytes: int
    """Below 0 if it does not fit."""


def tightest(plan: Plan) -> Tightest:
    """Return the tightest moment over all phases and ranks."""
    used_bytes, stage, phase = max(
        (used_bytes, -stage, phase)
        for stage in range(len(plan.stages))
        for phase, used_bytes in peaks(plan, stage).items()
    )
    rank, free_bytes = plan.census.ranks(-stage).start, usable_bytes(plan.config) - used_bytes
    return Tightest(phase, rank, used_bytes, free_bytes)


def usable_bytes(config: Config) -> int:
    return int(config.run.dry_run_gpu_memory_gib * GIB * USABLE_SHARE)


def full_contexts(plan: Plan) -> float:
    """Return the number of sequences of the longest context that one engine's KV cache holds at once."""
    return sequences(plan, plan.config.rollout.rollout_max_context_len or 0)


def sequences(plan: Plan, tokens: int) -> float:
    """Return the number of sequences of `tokens` tokens that one engine's KV cache holds at once, each with
    its recurrent state."""
    size = plan.config.rollout.rollout_num_gpus_per_engine
    sequence_bytes = kv_bytes(plan.shape, plan.needs, size, tokens)
    sequence_bytes += state_bytes_per_sequence(plan.shape, plan.needs, size)
    return plan.engine.kv_cache / sequence_bytes


_GRAPHS = "what CUDA graphs hold"
_OFFLOADED = "activations that wait in main memory"
_USER_BUFFERS = "buffers for communication beside computation"
_QUANTIZED = "inputs of matrix products in lower precision"
UNCOUNTED = {
    "activation_offload_fraction": _OFFLOADED,
    "cpu_offloading": _OFFLOADED,
    "cuda_graph_impl": _GRAPHS,
    "delay_offload_until_cuda_graph": _OFFLOADED,
    "distribute_saved_activations": "inputs of recomputed layers, cut over tensor-parallel ranks",
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "fine_grained_activation_offloading": _OFFLOADED,
    "fp4": _QUANTIZED,
    "fp4_param": "parameters in FP4",
    "fp8": _QUANTIZED,
    "fp8_dot_product_attention": "attention in FP8",
    "fp8_param": "parameters in FP8",
    "moe_enable_deepep": "DeepEP's buffers",
    "moe_paged_stash": _OFFLOADED,
    "moe_shared_expert_overlap": "activations of shared experts during the exchange",
    "moe_token_dispatcher_type": "buffers of the exchange",
    "overlap_moe_expert_parallel_comm": "a second micro-batch in progress",
    "tp_comm_overlap": _USER_BUFFERS,
}
"""Field of TransformerConfig → its memory that is not counted."""


def not_counted(overrides: Overrides) -> Iterator[str]:
    """Yield each setting of --model-override that changes memory uncounted, with what it changes."""
    for name, value in overrides.model.items():
        if name in UNCOUNTED and value not in (None, False, "none"):
            yield f"{name} ({UNCOUNTED[name]})"
    if unknown := sorted(overrides.recomputed_modules - COUNTED):
        yield f"recompute_modules {', '.join(unknown)}"


# --------------------------------------------------------------------------- main memory of a cluster's nodes

# Counted are the parts present in every run: the state of trainers and engines between steps, a checkpoint
# while it is written, and the least that the programs take. Activations of trainers on CPUs, data and Ray's
# object store come on top, so a run that passes may still lack memory.

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
