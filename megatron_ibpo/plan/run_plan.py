"""The dry run: what a configuration means on a cluster, and whether it can work, without a GPU.

Every rank's part of the real model is built on the meta device (`census`), memory is counted from it
(`memory`), and what training and vLLM would refuse is refused here, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from megatron_ibpo.cluster.placement import Engines, Node, Placement, plan_placement
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.models import ModelConfigError, ModelShape, check_layout, read_hf_config
from megatron_ibpo.models.cost import EXPERT_IMBALANCE
from megatron_ibpo.plan.census import Census, RankPart, take_census
from megatron_ibpo.plan.memory import (
    CONTEXT_BYTES,
    EngineMemory,
    RankMemory,
    engine_memory,
    kv_bytes_per_token,
    rank_memory,
    state_bytes_per_sequence,
    sync_bytes,
)
from megatron_ibpo.report.display import open_console, sizes_table
from megatron_ibpo.report.run_dir import checkpoint_bytes
from megatron_ibpo.report.sizes import run_sizes
from megatron_ibpo.words import counted

__all__ = ["FITS", "REFUSED", "Plan", "make_plan", "plan_run"]

FITS, REFUSED = 0, 2
USABLE_SHARE = 0.97
"""Of a GPU's memory: the driver keeps some, and 80 GB cards offer a little less than 80 GiB."""
GIB = 1024**3


@dataclass(frozen=True)
class Plan:
    """A configuration on a cluster. `problems` is empty when it can work as far as this can tell."""

    config: Config
    """With the context length resolved."""
    shape: ModelShape
    world_size: int
    problems: list[str]
    census: Census | None = None
    """None, and so are ranks and engine, when the sizes do not fit together already."""
    ranks: list[RankMemory] | None = None
    engine: EngineMemory | None = None
    placement: Placement | None = None

    @property
    def num_engines(self) -> int:
        return 0 if self.placement is None else len(self.placement.engines)


def plan_run(config: Config, console: Console | None = None) -> int:
    """Print the plan of a run.

    Returns:
        FITS (0), or REFUSED (2) after printing why.
    """
    if int(os.environ.get("RANK", 0)) != 0:
        return FITS
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the plan is the same on a machine with GPUs
    console = console or open_console()
    try:
        plan = make_plan(config, _world_size(config))
    except ModelConfigError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return REFUSED
    _print_plan(plan, console)
    return REFUSED if plan.problems else FITS


def make_plan(config: Config, world_size: int) -> Plan:
    """Work out the plan of a run on `world_size` ranks.

    Raises:
        ModelConfigError: there is no usable config.json.
    """
    assert config.model.hf_checkpoint is not None  # check_config saw to it
    shape = read_hf_config(config.model.hf_checkpoint)
    context = config.rollout.rollout_max_context_len or shape.max_position_embeddings
    config = replace(config, rollout=replace(config.rollout, rollout_max_context_len=context))
    problems = check_layout(shape, config.parallel, world_size)
    problems += _engine_problems(shape, config, world_size)
    problems += _context_problems(shape, config.rollout, context)
    if problems:
        return Plan(config, shape, world_size, problems)
    census = take_census(shape, config, world_size)
    max_tokens = max(config.model.max_tokens_per_gpu, context)
    ranks = [rank_memory(shape, config, part, census, max_tokens) for part in census.ranks]
    gpu_bytes = int(config.run.dry_run_gpu_memory_gib * GIB)
    engine = engine_memory(shape, config, census, gpu_bytes)
    plan = Plan(config, shape, world_size, problems, census, ranks, engine, _placement(config, world_size))
    problems += _memory_problems(plan)
    return plan


def _world_size(config: Config) -> int:
    return config.run.dry_run_world_size or int(os.environ.get("WORLD_SIZE", 1))


def _ranks_per_node(config: Config, world_size: int) -> int:
    return min(config.run.dry_run_gpus_per_node, world_size)


def _placement(config: Config, world_size: int) -> Placement:
    """On nodes like those of the dry run, as many as are needed."""
    rollout, per_node = config.rollout, _ranks_per_node(config, world_size)
    own = 0 if rollout.colocate else rollout.rollout_num_gpus or world_size
    nodes = [
        Node(f"node {index}", f"node {index}", cpus=per_node, gpus=per_node)
        for index in range(-(-world_size // per_node) + -(-own // per_node))
    ]
    engines = Engines(rollout.rollout_num_gpus_per_engine, rollout.colocate, rollout.rollout_num_gpus)
    return plan_placement(nodes, num_trainers=world_size, engines=engines, on_gpu=True)


# ----------------------------------------------------------------------------------------- what cannot work


def _engine_problems(shape: ModelShape, config: Config, world_size: int) -> Iterator[str]:
    """What vLLM would refuse."""
    size = config.rollout.rollout_num_gpus_per_engine
    flag = f"--rollout-num-gpus-per-engine={size}"
    per_node = _ranks_per_node(config, world_size)
    if world_size % per_node:
        yield f"--dry-run-gpus-per-node={per_node} does not divide the {world_size} ranks"
    else:
        try:
            _placement(config, world_size)
        except ValueError as error:
            yield str(error)
    counts = {**shape.divided_by_tp(), "an expert's hidden size": shape.expert_hidden_size}
    for what, count in counts.items():
        if count % size:
            yield f"{flag} does not divide {what} ({count})"
    heads = shape.num_key_value_heads
    if heads % size and size % heads:
        yield f"{flag}: vLLM can neither divide nor copy {heads} key/value heads evenly over {size} GPUs"


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
    assert plan.engine is not None
    assert plan.ranks is not None
    gpu_bytes = plan.config.run.dry_run_gpu_memory_gib * GIB
    limit = _usable_bytes(plan.config)
    peaks = [_peaks(plan, number) for number in range(plan.world_size)]
    advice = {
        "training": "raise --tensor- or --pipeline-model-parallel-size, turn on --use-distributed-optimizer "
        "or --recompute-granularity full, or lower --rollout-max-context-len and --max-tokens-per-gpu",
        "sampling": "lower --vllm-kv-cache-bytes or --vllm-gpu-memory-utilization, or raise "
        "--rollout-num-gpus-per-engine",
        "weight update": "lower --update-weight-buffer-size or --vllm-kv-cache-bytes",
    }
    for phase, hint in advice.items():
        rank = max(range(plan.world_size), key=lambda number: peaks[number][phase])
        most = peaks[rank][phase]
        if most > limit:
            yield (
                f"{phase} takes {most / GIB:.1f} GiB on rank {rank}, of {limit / GIB:.1f} GiB usable on a "
                f"GPU of {plan.config.run.dry_run_gpu_memory_gib:g} GiB: {hint}"
            )
    asked = plan.config.rollout.vllm_gpu_memory_utilization
    resident = max(memory.resident for memory in plan.ranks)
    if plan.config.rollout.colocate and asked * gpu_bytes + resident > gpu_bytes:
        yield (
            f"--vllm-gpu-memory-utilization={asked:g}: a starting engine wants that share free, "
            f"{asked * gpu_bytes / GIB:.1f} GiB, beside the trainer's {resident / GIB:.1f} GiB"
        )
    if _full_contexts(plan) < 1:
        yield (
            f"the KV cache of {plan.engine.kv_cache / GIB:.2f} GiB a GPU does not hold one context of "
            f"{plan.config.rollout.rollout_max_context_len} tokens: raise --vllm-kv-cache-bytes or "
            "--vllm-gpu-memory-utilization, or lower --rollout-max-context-len"
        )


def _peaks(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes in use at the worst moment of each phase, on the fuller GPU where trainer and engine have their
    own. A sleeping engine keeps its CUDA context."""
    assert plan.ranks is not None
    assert plan.engine is not None
    assert plan.census is not None
    trainer, engine = plan.ranks[rank], plan.engine
    _, buffers = sync_bytes(plan.census, plan.config)
    if not plan.config.rollout.colocate:
        return {
            "training": trainer.training,
            "sampling": engine.total,
            "weight update": max(trainer.resident, engine.total) + buffers,
        }
    return {
        "training": trainer.training + CONTEXT_BYTES,
        "sampling": trainer.resident + engine.total,
        # engines wake their weights first, and their KV cache when the new weights are in
        "weight update": trainer.resident + engine.weights + engine.workspace + buffers,
    }


def _usable_bytes(config: Config) -> int:
    return int(config.run.dry_run_gpu_memory_gib * GIB * USABLE_SHARE)


def _full_contexts(plan: Plan) -> float:
    """Sequences of the longest context that one engine's KV cache holds at once."""
    assert plan.engine is not None
    context = plan.config.rollout.rollout_max_context_len or 0
    one = context * kv_bytes_per_token(plan.shape, plan.config)
    one += state_bytes_per_sequence(plan.shape, plan.config)
    return plan.engine.kv_cache / one


# ------------------------------------------------------------------------------------------------ printing


def _print_plan(plan: Plan, console: Console) -> None:
    config = plan.config

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    devices = f"{counted(plan.world_size, 'GPU')} or CPU process{'' if plan.world_size == 1 else 'es'}"
    say(f"Plan of {config.model.hf_checkpoint} on {devices}; none is started.")
    say()
    say("Sizes")
    parameters = None if plan.census is None else plan.census.total
    sizes = run_sizes(
        config,
        plan.world_size,
        parameters=parameters,
        engines=len(plan.placement.engines) if plan.placement else None,
    )
    console.print(sizes_table(sizes))
    if plan.census is not None:
        say()
        say("Who sits where")
        console.print(_places_table(plan, plan.census))
        say()
        say("Memory of one GPU, GiB")
        console.print(_memory_table(plan, plan.census))
        say()
        for line in _remarks(plan, plan.census):
            say(line)
    say()
    if not plan.problems:
        say("This fits.")
        return
    say("This cannot work:")
    for problem in plan.problems:
        say(f"  - {problem}")


def _places_table(plan: Plan, census: Census) -> Table:
    per_node = _ranks_per_node(plan.config, plan.world_size)
    assert plan.placement is not None
    on_rank = {
        rank: f"{engine}, as rank {number}"
        for engine, partners in enumerate(plan.placement.partners)
        for number, rank in enumerate(partners)
    }
    table = Table(show_edge=False, pad_edge=False)
    for name in ("node", "GPU", "rank", "TP", "PP", "EP", "DP", "expert DP", "layers", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("engine")
    first = [0]
    for stage in range(plan.config.parallel.pipeline_model_parallel_size):
        layers = next(part.layers for part in census.ranks if part.pipeline == stage)
        first.append(first[-1] + layers)
    for part in census.ranks:
        if part.rank and part.rank % per_node == 0:
            table.add_section()
        table.add_row(
            *map(str, (part.rank // per_node, part.rank % per_node, part.rank, part.tensor, part.pipeline)),
            *map(str, (part.expert if plan.shape.is_moe else "-", part.data)),
            str(part.expert_data) if plan.shape.is_moe else "-",
            f"{first[part.pipeline]}–{first[part.pipeline + 1] - 1}",
            f"{part.parameters:,}",
            on_rank.get(part.rank, "–"),
        )
    return table


def _memory_table(plan: Plan, census: Census) -> Table:
    assert plan.ranks is not None
    assert plan.engine is not None
    _, buffers = sync_bytes(census, plan.config)
    columns = _distinct(census.ranks, plan.ranks)
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for ranks in columns:
        table.add_column(_ranks_name(ranks), justify="right")

    def row(name: str, values: Sequence[int]) -> None:
        table.add_row(name, *(_gib(value) for value in values))

    memories = [plan.ranks[ranks[0]] for ranks in columns]
    peaks = [_peaks(plan, ranks[0]) for ranks in columns]
    colocated = plan.config.rollout.colocate
    row("weights", [memory.weights for memory in memories])
    row("gradients, fp32", [memory.gradients for memory in memories])
    row("optimizer state", [memory.optimizer for memory in memories])
    row("activations *", [memory.activations for memory in memories])
    row("logits *", [memory.logits for memory in memories])
    processes = "process *, sleeping engine *" if colocated else "process *"
    row(processes, [(1 + colocated) * CONTEXT_BYTES] * len(columns))
    row("= training", [peak["training"] for peak in peaks])
    table.add_section()
    if colocated:
        row("trainer at rest", [memory.resident for memory in memories])
    row("engine weights", [plan.engine.weights] * len(columns))
    row("KV cache", [plan.engine.kv_cache] * len(columns))
    row("engine workspace *", [plan.engine.workspace] * len(columns))
    row("= sampling", [peak["sampling"] for peak in peaks])
    table.add_section()
    row("weight-update buffers", [buffers] * len(columns))
    row("= weight update", [peak["weight update"] for peak in peaks])
    table.add_section()
    row("usable", [_usable_bytes(plan.config)] * len(columns))
    return table


def _distinct(parts: Sequence[RankPart], memories: Sequence[RankMemory]) -> list[list[int]]:
    """Ranks with the same memory, grouped, in order."""
    groups: dict[RankMemory, list[int]] = {}
    for part, memory in zip(parts, memories, strict=True):
        groups.setdefault(memory, []).append(part.rank)
    return list(groups.values())


def _ranks_name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"{len(ranks)} ranks: {ranks[0]} …"


def _gib(value: int) -> str:
    gib = value / GIB
    return f"{gib:.2f}" if gib >= 0.1 or value == 0 else f"{gib:.5f}"


def _remarks(plan: Plan, census: Census) -> list[str]:
    assert plan.engine is not None
    config, rollout = plan.config, plan.config.rollout
    sent, _ = sync_bytes(census, config)
    saved = checkpoint_bytes(census.total, bf16=config.model.bf16)
    expert_dp = f", expert DP {census.expert_data_parallel}" if plan.shape.is_moe else ""
    sharding = "sharded over these" if config.parallel.use_distributed_optimizer else "not sharded"
    where = ""
    if rollout.colocate:
        per_node = _ranks_per_node(config, plan.world_size) * plan.engine.weights
        where = (
            f", on the trainers' GPUs; asleep while those train, their weights in {_gib(per_node)} GiB of "
            "each node's main memory"
        )
    elif plan.placement is not None:
        rows = [f"{node}: {engines}" for node, _, engines in plan.placement.rows() if engines != "–"]
        where = f", on GPUs of their own ({'; '.join(rows)})"
    state = state_bytes_per_sequence(plan.shape, config)
    states = f", and {state / 1024**2:.2f} MiB of recurrent state per sequence" if state else ""
    lines = [
        f"parameters: {census.total:,}; DP {census.data_parallel}{expert_dp}; optimizer state {sharding}",
        f"engines: {plan.num_engines} of {counted(rollout.rollout_num_gpus_per_engine, 'GPU')} each{where}",
        f"KV cache: {kv_bytes_per_token(plan.shape, config):,} bytes a token and GPU{states}; one engine "
        f"holds {_full_contexts(plan):.1f} contexts of {rollout.rollout_max_context_len:,} tokens",
        f"weight update: {_gib(sent)} GiB to each engine, in buckets of "
        f"{rollout.update_weight_buffer_size / 1024**2:.0f} MiB",
        f"disk: {_gib(saved)} GiB for one checkpoint and the Hugging Face export",
        "* estimated, for Transformer Engine, flash attention and flash-linear-attention; the rest is "
        "counted on the real model",
    ]
    if plan.shape.is_moe:
        lines.append(
            f"* the fullest expert-parallel rank is taken to get {EXPERT_IMBALANCE:g} times its even share "
            "of tokens"
        )
    return lines
