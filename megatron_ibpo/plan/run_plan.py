"""The plan that `--dry-run` prints: the layout of a configuration on a cluster, and whether it can work."""

import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from rich.console import Console
from rich.table import Table

from megatron_ibpo.basics.rendezvous import environment_number
from megatron_ibpo.basics.text import counted, listed
from megatron_ibpo.cluster.placement import main_memory
from megatron_ibpo.config import Config
from megatron_ibpo.credit import find_operator
from megatron_ibpo.engines.registry import check_model as check_engine_model
from megatron_ibpo.engines.registry import check_truncation, fallback_note, on_device
from megatron_ibpo.models import ModelConfigError, padded_vocab_size
from megatron_ibpo.models.backends import ALLOW, FAST, served_by
from megatron_ibpo.models.cost import EXPERT_IMBALANCE
from megatron_ibpo.plan.feasibility import (
    Misfit,
    Plan,
    full_contexts,
    make_plan,
    memory_on_cpus,
    not_counted,
    peaks,
    ranks_per_node,
    sequences,
    tightest,
    usable_bytes,
)
from megatron_ibpo.plan.hardware import read_hardware
from megatron_ibpo.plan.memory import GIB, RankMemory, kv_bytes, state_bytes_per_sequence, sync_bytes
from megatron_ibpo.plan.parameter_count import Census
from megatron_ibpo.plan.prediction import lines, setting_of
from megatron_ibpo.report.display import open_console, run_sizes, sizes_table
from megatron_ibpo.weights.formats.run_state import checkpoint_bytes, kept_at_once, kept_bytes

FITS, REFUSED = 0, 2

_MAX_RANKS_SHOWN = 256
"""Most ranks that the plan lists one by one."""
_MOST_NODES = 64
"""Most nodes with engines on their own GPUs to list."""


def plan_run(config: Config, console: Console | None = None) -> int:
    """Print the plan of a run. Return FITS (0), or REFUSED (2) after printing the reason."""
    has_gpu = torch.cuda.device_count() > 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that the plan is the same on a machine with GPUs
    console = console or open_console()
    try:
        plan = make_plan(
            config, config.run.dry_run_world_size or environment_number("WORLD_SIZE", 1, least=1)
        )
        if isinstance(plan, Plan):
            from megatron_ibpo.policy.model import check_model  # these import Megatron
            from megatron_ibpo.policy.process_start import hush_megatron

            hush_megatron()
            check_model(plan.shape, plan.config)  # refuses settings of --model-override
    except (ModelConfigError, ValueError) as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return REFUSED
    _print_plan(plan, console, "" if has_gpu or isinstance(plan, Misfit) else _on_this_machine(plan, config))
    return REFUSED if plan.problems else FITS


def _on_this_machine(plan: Plan, config: Config) -> str:
    """Return the main memory that the run would take here, on CPUs. Empty if this machine has fewer CPUs than
    the run has ranks, since such a plan is for another one.

    Args:
        config: configuration as the user gave it, without the plan's choices for GPUs.
    """
    if plan.world_size > (os.cpu_count() or 1):
        return ""
    context = plan.config.rollout.rollout_max_context_len
    note = fallback_note(config.rollout, plan.shape, on_gpu=False)
    config = on_device(config, plan.shape, on_gpu=False, max_context=context)
    try:
        check_engine_model(config.rollout, plan.shape, on_gpu=False)
        check_truncation(config, on_gpu=False)
        parts = memory_on_cpus(config, plan.shape, plan.census)
    except ValueError as error:
        return f"On this machine, which has no GPU, it cannot run: {error}"
    total, memory = sum(parts.values()), main_memory()
    named = "; ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    enough = "" if total < memory else " This is too little."
    return (
        f"On this machine, which has no GPU, its processes hold {_gib(total)} GiB of {_gib(memory)} GiB of "
        f"main memory ({named}); activations and data come on top.{enough}"
        f"{'' if note is None else f' {note}'}"
    )


def _print_plan(plan: Plan | Misfit, console: Console, on_this_machine: str) -> None:
    config = plan.config

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    devices = f"{counted(plan.world_size, 'GPU')} or CPU process{'' if plan.world_size == 1 else 'es'}"
    say(f"Plan of {config.model.hf_checkpoint} on {devices}; nothing is started.")
    say()
    say("Sizes")
    layers = served_by(plan.shape, FAST, bf16=bool(config.model.bf16))
    corrections = find_operator(config.algorithm).ibpo_corrections
    sizes = run_sizes(
        config,
        plan.world_size,
        corrections=corrections,
        parameters=plan.census.total if isinstance(plan, Plan) else None,
        engines=len(plan.placement.engines) if isinstance(plan, Plan) else None,
        layers=layers,
    )
    console.print(sizes_table(sizes))
    if isinstance(plan, Plan):
        say()
        say("Placement of processes")
        console.print(_places_table(plan))
        say()
        say("Memory of one GPU, GiB")
        console.print(_memory_table(plan))
        say()
        say("\n".join(_remarks(plan)))
        if on_this_machine:
            say()
            say(on_this_machine)
        if config.run.dry_run_hardware is not None:
            say()
            _say_time(plan, config.run.dry_run_hardware, say)
    say()
    if isinstance(plan, Plan) and not plan.problems:
        least = tightest(plan)
        say(in_short(plan))
        say(
            f"This fits. {least.phase.capitalize()} on rank {least.rank} takes most, "
            f"{_gib(least.used_bytes)} GiB, and leaves {_gib(least.free_bytes)}."
        )
        return
    say("This cannot work:")
    for problem in plan.problems:
        say(f"  - {problem}")


def _say_time(plan: Plan, hardware: str, say: Callable[[str], None]) -> None:
    config = plan.config
    say(f"Time on {hardware}, predicted; its errors are in docs/planner.md")
    try:
        setting = setting_of(config, plan.shape, plan.world_size, read_hardware(hardware))
        time_lines = lines(setting, config.run.num_rollout, config.run.gpu_hour_price)
    except ValueError as error:
        time_lines = [f"not predicted: {error}"]
    say("\n".join(time_lines))


def in_short(plan: Plan) -> str:
    """Return a line on a plan's needs, as in the heads of the recipes."""
    by_stage = [peaks(plan, stage) for stage in range(len(plan.stages))]
    fullest = ", ".join(
        f"{phase} {max(phases[phase] for phases in by_stage) / GIB:.1f}" for phase in by_stage[0]
    )
    node, disk = sum(plan.host.values()), _disk_bytes(plan.config, plan.census)
    gpus = f"{counted(plan.world_size, 'GPU')} of {plan.config.run.dry_run_gpu_memory_gib:g} GiB"
    return (
        f"Needs {gpus}, of which {usable_bytes(plan.config) / GIB:.1f} can be used. GiB of the fullest: "
        f"{fullest}. GiB of a node's main memory: {node / GIB:,.0f}; of disk: {disk / GIB:,.0f}."
    )


def _places_table(plan: Plan) -> Table:
    census, per_node = plan.census, ranks_per_node(plan.config, plan.world_size)
    table = Table(show_edge=False, pad_edge=False)
    for name in ("node", "GPU", "rank", "TP", "PP", "EP", "DP", "expert DP", "layers", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("engine")
    first = list(accumulate((part.layers for part in census.stages), initial=0))
    previous = -1
    for rank in _shown_ranks(census, per_node):
        place = census.place(rank)
        if rank and rank % per_node == 0:
            table.add_section()
        if rank != previous + 1:
            table.add_row(*["…"] * 10, f"{rank - previous - 1:,} ranks, placed alike")
            table.add_section()
        previous = rank
        engine, number = divmod(rank, plan.config.rollout.rollout_num_gpus_per_engine)
        table.add_row(
            *map(str, (rank // per_node, rank % per_node, rank, place.tensor, place.pipeline)),
            *map(str, (place.expert if plan.shape.is_moe else "-", place.data)),
            str(place.expert_data) if plan.shape.is_moe else "-",
            f"{first[place.pipeline]}–{first[place.pipeline + 1] - 1}",
            f"{census.stages[place.pipeline].parameters:,}",
            f"{engine}, as rank {number}" if plan.placement.colocated else "–",
        )
    return table


def _shown_ranks(census: Census, per_node: int) -> list[int]:
    """Return all ranks, or of many those of the first node of each stage and of the last node."""
    if census.world_size <= _MAX_RANKS_SHOWN:
        return list(range(census.world_size))
    starts = [census.ranks(stage).start for stage in range(len(census.stages))]
    nodes = sorted({rank // per_node for rank in [*starts, census.world_size - 1]})
    return [node * per_node + gpu for node in nodes for gpu in range(per_node)]


def _memory_table(plan: Plan) -> Table:
    census = plan.census
    _, buffers = sync_bytes(census, plan.config)
    of_memory: dict[RankMemory, list[int]] = {}
    for stage, memory in enumerate(plan.stages):
        of_memory.setdefault(memory, []).append(stage)
    columns = list(of_memory.values())  # stages with the same memory share one
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for stages in columns:
        table.add_column(_ranks_name([census.ranks(stage) for stage in stages]), justify="right")

    memories = [plan.stages[stages[0]] for stages in columns]
    worst = [peaks(plan, stages[0]) for stages in columns]
    engine, colocated = plan.engine, plan.config.rollout.colocate

    def row(name: str, value: Callable[[RankMemory], int]) -> None:
        values = [value(memory) for memory in memories]
        if any(values):
            table.add_row(name, *map(_gib, values))

    def total(phase: str) -> None:
        table.add_row(f"= {phase}", *(_gib(peak[phase]) for peak in worst))
        table.add_section()

    row("weights", lambda trainer: trainer.weights)
    row("gradients, fp32", lambda trainer: trainer.gradients)
    row("optimizer state", lambda trainer: trainer.optimizer)
    row("CUDA and NCCL *", lambda trainer: trainer.process)
    row("FP8 copies of weights *", lambda trainer: trainer.copies)
    if colocated:
        row("sleeping engine *", lambda _: engine.asleep)
    row("gradients measured, fp32", lambda trainer: trainer.second_gradients)
    row("activations *", lambda trainer: trainer.activations)
    row("logits *", lambda trainer: trainer.logits)
    row("fragments *", lambda trainer: trainer.fragments)
    total("training")
    row("pass without gradient *", lambda trainer: trainer.without_gradient)
    total("log-probs")
    total("saving")
    row("trainer", lambda trainer: trainer.updating)
    row("engine weights", lambda _: engine.weights)
    row("CUDA, NCCL, graphs of engine *", lambda _: engine.asleep)
    row("module being loaded", lambda _: engine.loading)
    row("weight-update buffers", lambda _: buffers)
    total("weight update")
    if colocated:
        row("trainer at rest", lambda trainer: trainer.resting)
    row("engine weights", lambda _: engine.weights)
    row("CUDA, NCCL, graphs of engine *", lambda _: engine.asleep)
    row("KV cache", lambda _: engine.kv_cache)
    row("engine workspace *", lambda _: engine.workspace)
    total("sampling")
    row("usable", lambda _: usable_bytes(plan.config))
    return table


def _ranks_name(parts: Sequence[range]) -> str:
    """Return the name of the ranks of some stages."""
    first, last, count = parts[0].start, parts[-1].stop - 1, sum(map(len, parts))
    if count == 1:
        return f"rank {first}"
    if last - first == count - 1:
        return f"ranks {first}–{last}"
    return f"{count} ranks: {first} …"


def _gib(value: int) -> str:
    gib = value / GIB
    return f"{gib:.2f}" if gib >= 0.1 or value == 0 else f"{gib:.5f}"


def _remarks(plan: Plan) -> list[str]:
    config, rollout, census = plan.config, plan.config.rollout, plan.census
    sent, engines = sync_bytes(census, config)[0], len(plan.placement.engines)
    context = config.parallel.context_parallel_size
    ids, rows = plan.shape.vocab_size, padded_vocab_size(plan.shape, config.parallel)
    is_whole = census.trained == census.total
    adapters = "" if is_whole else f", frozen; {census.trained:,} of adapters are trained"
    shared = f" x CP {context}" if context > 1 else ""
    expert_dp = f", expert DP {census.expert_data_parallel}" if plan.shape.is_moe else ""
    sharding = "sharded over these" if config.parallel.use_distributed_optimizer else "not sharded"
    host_parts = "; ".join(f"{name} {_gib(size)}" for name, size in plan.host.items() if size)
    engine_place = ", on the trainers' GPUs; asleep while those train" if rollout.colocate else ""
    if not rollout.colocate:
        nodes = [f"{node}: {engines}" for node, _, engines in plan.placement.rows() if engines != "–"]
        engine_place = f", on GPUs of their own ({listed(nodes, '; ', most=_MOST_NODES)})"
    lines = [
        f"parameters: {census.total:,}{adapters}; DP {census.data_parallel // context}{shared}"
        f"{expert_dp}; optimizer state {sharding}",
        *([f"vocabulary: {ids:,} ids, padded to {rows:,} rows for the trainers"] if rows > ids else []),
        f"engines: {engines} of {counted(rollout.rollout_num_gpus_per_engine, 'GPU')} each{engine_place}",
        _kv_cache(plan),
        f"weight update: {_gib(sent)} GiB to each engine, in buckets of "
        f"{rollout.update_weight_buffer_size / 1024**2:.0f} MiB",
        f"main memory of a node: {_gib(sum(plan.host.values()))} GiB"
        + (f" ({host_parts})" if host_parts else ""),
        _disk(config, census),
        "* estimated, for Transformer Engine, flash attention and flash-linear-attention; the rest is "
        "counted",
    ]
    if uncounted := list(not_counted(plan.overrides)):
        lines.append(f"not counted, from --model-override: {'; '.join(uncounted)}")
    if config.model.mtp_num_layers:
        lines.append("not counted: what a pass of the multi-token prediction layer keeps on the GPU")
    if config.model.allow_local_modules:
        lines.append(
            f"* {ALLOW}: plain torch replaces libraries that are missing where the run takes place, and "
            "keeps more activations than estimated here"
        )
    if plan.shape.is_moe:
        lines.append(
            f"* the fullest expert-parallel rank is assumed to get {EXPERT_IMBALANCE:g} times its even "
            "share of tokens"
        )
    return lines


def _kv_cache(plan: Plan) -> str:
    rollout, needs = plan.config.rollout, plan.needs
    size = rollout.rollout_num_gpus_per_engine
    state = state_bytes_per_sequence(plan.shape, needs, size)
    states = f", and {state / 1024**2:.2f} MiB of recurrent state per sequence" if state else ""
    responses = sequences(plan, rollout.rollout_max_response_len)
    windows = "".join(
        f", in {layers} layers of the last {window:,} tokens alone"
        for window, layers in plan.shape.attention_windows().items()
        if window is not None
    )
    return (
        f"KV cache: {kv_bytes(plan.shape, needs, size, 1):,} bytes per token and GPU{windows}{states}; "
        f"one engine holds {full_contexts(plan):.1f} contexts of {rollout.rollout_max_context_len:,} "
        f"tokens, or {responses:.0f} responses of {rollout.rollout_max_response_len:,}; it runs at most "
        f"{needs.most_running} sequences at once ({needs.most_running_flag})"
    )


def _disk(config: Config, census: Census) -> str:
    if not config.run.save:
        return "disk: no checkpoints, --no-save"
    checkpoints, exports = kept_at_once(config.run)
    checkpoint = config.algorithm.num_models * checkpoint_bytes(census.trained, bf16=bool(config.model.bf16))
    return (
        f"disk: {_gib(_disk_bytes(config, census))} GiB for {counted(checkpoints, 'checkpoint')} at one "
        "time (--keep-checkpoints, and one being written) of "
        f"{_gib(checkpoint)} each and "
        f"{counted(exports, 'Hugging Face export')}"
    )


def _disk_bytes(config: Config, census: Census) -> int:
    """Return the bytes that a run keeps on disk at one time."""
    return kept_bytes(config, parameters=census.total, trained=census.trained)
