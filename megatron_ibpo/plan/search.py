"""Search for layouts of a run whose memory fits, ranked by the predicted seconds of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from megatron_ibpo.config import Config, display_name
from megatron_ibpo.models import ModelShape, check_layout, read_hf_config
from megatron_ibpo.plan.feasibility import Misfit, Plan, make_plan
from megatron_ibpo.plan.hardware import Hardware, read_hardware
from megatron_ibpo.plan.prediction import Setting, setting_of
from megatron_ibpo.plan.roofline import pass_time

SIZES = (1, 2, 4, 8)
"""Sizes of tensor and pipeline parallelism."""
CONTEXTS = (1, 2, 4, 8, 16)
"""Sizes of context parallelism."""
EXPERTS = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")
ENGINES = (1, 2, 4, 8, 16)
"""GPUs per engine."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs for engines with their own GPUs."""
STALENESS = (0, 1, 4)
"""Steps that engines with their own GPUs sample ahead."""
_TRAINERS = 12
"""Number of fastest trainer layouts to combine with every kind of engines."""


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits."""

    config: Config
    seconds: float
    """Seconds per step."""
    setting: Setting
    plan: Plan


def search(config: Config, gpus: int, hardware: str, most: int = 8) -> list[FittingLayout]:
    """Return the fastest layouts that fit, fastest first.

    Args:
        config: model, batch and lengths; its layout is replaced.

    Raises:
        ValueError: no such hardware, or nothing fits.
    """
    shape, kind = read_hf_config(config.model.hf_dir), read_hardware(hardware)
    run = replace(
        config.run,
        dry_run_hardware=kind.name,
        dry_run_gpu_memory_gib=kind.memory_gib,
        dry_run_gpus_per_node=min(8, kind.linked, gpus),
    )
    timed = [
        (setting.times().total, number, setting, candidate)
        for number, (setting, candidate) in enumerate(
            _candidates(replace(config, run=run), shape, kind, gpus)
        )
    ]
    fitting: list[FittingLayout] = []
    problems: list[str] = []
    for seconds, _, setting, candidate in sorted(timed, key=lambda entry: entry[:2]):
        plan = make_plan(candidate, setting.layout.gpus, shape)
        if isinstance(plan, Misfit) or plan.problems:
            problems = problems or plan.problems
            continue
        fitting.append(FittingLayout(candidate, seconds, setting, plan))
        if len(fitting) == most:
            break
    if not fitting:
        reason = f": {problems[0]}" if problems else ""
        raise ValueError(
            f"no layout of {display_name(config.model.hf_dir)} fits {gpus} GPUs of {kind.name}{reason}"
        )
    return fitting


def _candidates(
    config: Config, shape: ModelShape, hardware: Hardware, gpus: int
) -> Iterator[tuple[Setting, Config]]:
    """Yield engines of every kind with the trainer's fastest layouts, where both have room."""
    for engine_gpus in (0, *(int(gpus * share) for share in SHARES if gpus * share >= 1)):
        trainers = _trainers(config, shape, hardware, gpus - engine_gpus)
        for trainer, size, staleness in product(trainers, ENGINES, STALENESS if engine_gpus else (0,)):
            if size > (engine_gpus or gpus) or (engine_gpus or gpus) % size:
                continue
            rollout = replace(
                trainer.rollout,
                colocate=not engine_gpus,
                rollout_num_gpus=engine_gpus or None,
                rollout_num_gpus_per_engine=size,
                max_staleness=staleness,
            )
            candidate = replace(trainer, rollout=rollout)
            setting = setting_of(candidate, shape, gpus - engine_gpus, hardware)
            try:
                setting.times()
            except ValueError:  # an engine does not hold weights and a sequence
                continue
            yield setting, candidate


def _trainers(config: Config, shape: ModelShape, hardware: Hardware, gpus: int) -> list[Config]:
    """Return the fastest trainer layouts whose training fits by itself."""
    timed = []
    for number, candidate in enumerate(_layouts(config, shape, gpus)):
        setting = setting_of(candidate, shape, gpus, hardware)
        task = setting.task
        passes = pass_time(setting.basis, setting.layout, task.batch, steps=task.updates)
        timed.append((passes.total, number, candidate))
    fitting = []
    for _, _, candidate in sorted(timed, key=lambda entry: entry[:2]):
        plan = make_plan(candidate, gpus, shape)
        if not any(problem.startswith("training takes") for problem in plan.problems):
            fitting.append(candidate)
        if len(fitting) == _TRAINERS:
            break
    return fitting


def _layouts(config: Config, shape: ModelShape, gpus: int) -> Iterator[Config]:
    experts = EXPERTS if shape.is_moe else (1,)
    for tensor, pipeline, context, expert in product(SIZES, SIZES, CONTEXTS, experts):
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            use_distributed_optimizer=True,
        )
        if tensor > gpus or check_layout(shape, parallel, gpus, 1):
            continue
        for recompute, offload in product(RECOMPUTE, (False, True)):
            model = replace(config.model, recompute_granularity=recompute)
            optimizer = replace(
                config.optimizer, optimizer_cpu_offload=offload, use_precision_aware_optimizer=offload
            )
            yield replace(config, parallel=parallel, model=model, optimizer=optimizer)
