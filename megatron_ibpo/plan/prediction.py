"""The predicted time of a run: seconds per step by stage, and GPU-hours; its forecast before the first step,
in the stages that a run measures; and the search for layouts whose memory fits, ranked by predicted time.

Stages of a step are predicted by the roofline, and add up. Engines that sample ahead work in parallel with
the trainer: the slower of both counts, and several steps share the wait for the longest response.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from megatron_ibpo.config import Config, display_name
from megatron_ibpo.credit import find_operator
from megatron_ibpo.engines.registry import engine_needs
from megatron_ibpo.models import ModelShape, check_layout, read_hf_config
from megatron_ibpo.plan.feasibility import Misfit, Plan, make_plan
from megatron_ibpo.plan.hardware import Hardware, kind_of, read_hardware
from megatron_ibpo.plan.roofline import checkpoint_seconds, decode_seconds, pass_time, sample, update_seconds
from megatron_ibpo.plan.workload import (
    Basis,
    Engine,
    Layout,
    Sampled,
    Task,
    fitted,
    log_normal,
    stand_ins,
)
from megatron_ibpo.policy.overrides import read_overrides
from megatron_ibpo.report.stages import SAMPLING, STEP, TRAINING, WEIGHTS, Forecast

WRONG = 0.5
"""Assumed share of wrong responses; each is corrected --ibpo-corrections times."""
_POINTS = 512
"""Quantiles that represent the lengths of a step's responses."""
_PROMPT = 200
"""Assumed tokens of a prompt: a question of mathematics."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Predicted seconds of a step by stage. If engines sample ahead, `total` is less than the sum."""

    sampling: float
    corrections: float
    """Corrections, beyond the tail of the responses that hides some of them."""
    log_probs: float
    update: float
    weights: float
    switching: float
    """Moves of colocated trainers' and engines' state to main memory and back."""
    other: float
    total: float
    bound: dict[str, str]
    """Stage → its largest part."""
    sampled: Sampled
    corrected: Sampled

    def stages(self) -> dict[str, float]:
        """Return the seconds by stage, in the order of a step."""
        names = ("sampling", "corrections", "log_probs", "update", "weights", "switching", "other")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All inputs of a prediction."""

    basis: Basis
    layout: Layout
    engine: Engine
    task: Task
    engine_gpus: int
    """GPUs of all engines; the trainer's own if colocated."""
    colocated: bool
    transport: Literal["gathered", "resharded", "ipc"] | None = None
    """Kind of weight update; None: ipc if colocated, otherwise gathered."""
    factor: float = 1.0
    """90 % error factor of a step's time."""

    @property
    def gpus(self) -> int:
        """GPUs of trainers and engines."""
        return self.layout.gpus + (0 if self.colocated else self.engine_gpus)

    def times(self) -> StepTimes:
        """Return the times of one step in the steady state. Raises ValueError if an engine cannot hold the
        weights and a sequence."""
        basis = replace(self.basis, reached=self.basis.reached.within_a_loop())
        layout, engine, task, colocated = self.layout, self.engine, self.task, self.colocated
        engines = max(1, self.engine_gpus // engine.tensor)
        ahead = task.staleness > 0 and not colocated
        stream = task.staleness + 1 if ahead else 1
        first = _phase(basis, engine, task, task.count / engines, task.prompt, task.group, stream)
        count, prompt_tokens = task.count * task.corrections / engines, task.prompt + task.correction_prompt
        second = _phase(basis, engine, task, count, prompt_tokens, 1, stream)
        corrections = second.seconds - min(first.tail, second.seconds)
        scoring = pass_time(basis, replace(layout, recompute="none"), task.batch, backward=False)
        passes = pass_time(basis, layout, task.batch, steps=task.updates)
        log_probs, update = task.passes_without_gradient * scoring.total, task.epochs * passes.total
        transport = self.transport or ("ipc" if colocated else "gathered")
        weights = update_seconds(basis, transport, engine_tensor=engine.tensor, gpus=self.gpus)
        switching = 2 * checkpoint_seconds(basis, layout) if colocated else 0.0
        sampling, training = first.seconds + corrections, log_probs + update
        working = max(sampling, training) if ahead else sampling + training
        return StepTimes(
            sampling=first.seconds,
            corrections=corrections,
            log_probs=log_probs,
            update=update,
            weights=weights,
            switching=switching,
            other=basis.reached.step,
            total=working + weights + switching + basis.reached.step,
            bound={
                "sampling": _sampling_bound(basis, engine, task, first),
                "log_probs": scoring.largest(),
                "update": passes.largest(),
            },
            sampled=first,
            corrected=second,
        )


def _phase(
    basis: Basis, engine: Engine, task: Task, count: float, prompt: float, group: int, stream: int
) -> Sampled:
    """Return the time per step of an engine that writes `count` responses of the task's lengths per step.

    Args:
        stream: steps whose responses are in flight at once; they share the wait for the longest.
    """
    lengths, times = stand_ins(task.responses, math.ceil(count * stream))
    return sample(basis, engine, lengths, times=times, prompt=prompt, group=group).shared(stream)


def _sampling_bound(basis: Basis, engine: Engine, task: Task, sampled: Sampled) -> str:
    if sampled.tail > sampled.seconds / 2:
        return "the longest responses"
    if sampled.prompts > sampled.seconds / 2:
        return "prompts"
    running, reached = max(1.0, sampled.mean_running), basis.reached
    seconds = decode_seconds(basis, engine, running, task.prompt + float(np.mean(task.responses)) / 2)
    parts = {
        "caches": seconds - decode_seconds(basis, engine, running, 0),
        "sequences' overhead": running * reached.engine_sequence,
        "layers' overhead": basis.shape.num_layers * reached.engine_layer,
    }
    parts["weights"] = seconds - sum(parts.values())
    return max(parts, key=parts.__getitem__)


def setting_of(config: Config, shape: ModelShape, world_size: int, hardware: Hardware) -> Setting:
    """Return the setting of a configuration whose device and context are resolved (`plan.feasibility`).
    Raises ValueError if a mean length exceeds the longest."""
    rollout, needs = config.rollout, engine_needs(config)
    engine = Engine(
        tensor=rollout.rollout_num_gpus_per_engine,
        memory_share=needs.memory_share,
        most_running=needs.most_running,
    )
    return Setting(
        basis=Basis(shape=shape, hardware=hardware, reached=fitted().coefficients),
        layout=_layout_of(config, world_size),
        engine=engine,
        task=task_of(config),
        engine_gpus=world_size if rollout.colocate else rollout.rollout_num_gpus or world_size,
        colocated=rollout.colocate,
        factor=fitted().error["step"],
    )


def _layout_of(config: Config, world_size: int) -> Layout:
    parallel, overrides = config.parallel, read_overrides(config)
    return Layout(
        gpus=world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        chunks=overrides.chunks,
        precision="fp8" if overrides.model.get("fp8") else "bf16",
        recompute=config.model.recompute_granularity,
        offload_optimizer=config.optimizer.optimizer_cpu_offload,
        delta_net_cp=parallel.delta_net_cp,
        micro_batch=config.model.max_tokens_per_gpu * parallel.context_parallel_size,
    )


def task_of(config: Config) -> Task:
    """Return the work of a step, with the usual lengths. Raises ValueError if a mean length exceeds the
    longest."""
    rollout, longest = config.rollout, config.rollout.rollout_max_response_len
    mean = config.run.dry_run_response_len or max(1, longest // 2)
    if mean > longest:
        raise ValueError(f"--dry-run-response-len={mean} exceeds --rollout-max-response-len={longest}")
    operator = find_operator(config.algorithm)
    corrections = operator.ibpo_corrections * WRONG
    return Task(
        responses=log_normal(mean, longest, _POINTS),
        count=rollout.rollout_batch_size * rollout.n_samples_per_prompt,
        prompt=_PROMPT,
        group=rollout.n_samples_per_prompt,
        corrections=corrections,
        correction_prompt=mean * operator.ibpo_k if corrections else 0,
        updates=config.loss.num_steps_per_rollout,
        epochs=config.loss.num_epochs_per_rollout,
        passes_without_gradient=1 + (config.loss.kl_coef > 0),
        staleness=rollout.max_staleness,
    )


def lines(setting: Setting, steps: int, price: float | None = None) -> list[str]:
    """Return the prediction in lines for users.

    Args:
        steps: steps of the whole run.
        price: price of a GPU-hour, in any currency.
    """
    times, factor = setting.times(), setting.factor
    total, tokens = times.total, setting.task.count * float(np.mean(setting.task.responses))
    hours = total * steps * setting.gpus / 3600
    summary = [
        f"a step: {_seconds(total)}, between {_seconds(total / factor)} and {_seconds(total * factor)}; "
        f"{tokens / total / setting.gpus:,.0f} response tokens per second and GPU"
    ]
    for stage, seconds in times.stages().items():
        if seconds >= 0.005 * total:
            bound = times.bound.get(stage)
            summary.append(
                f"  {stage.replace('_', '-')}: {_seconds(seconds)}{f' ({bound})' if bound else ''}"
            )
    if not setting.colocated and setting.task.staleness:
        summary.append("  engines and trainers work at the same time: a step takes less than the sum")
    sampled = times.sampled
    summary.append(
        f"an engine runs {sampled.mean_running:.0f} sequences on average, of {sampled.slots} slots; "
        f"{100 * sampled.tail / max(sampled.seconds, 1e-9):.0f} % of sampling waits for the longest responses"
    )
    copying = checkpoint_seconds(setting.basis, setting.layout)
    summary.append(
        f"a checkpoint: training waits {_seconds(copying)} for its copy in main memory, "
        "which is written while training goes on"
    )
    cost = "" if price is None else f", {hours * price:,.0f} at {price:g} per hour"
    summary.append(f"the run of {steps} steps: {hours:,.0f} GPU-hours{cost}")
    return summary


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def forecast(config: Config, shape: ModelShape, world_size: int, device: str) -> Forecast:
    """Return the forecast of a run whose configuration is resolved.

    Args:
        device: name of the device that its trainers compute on.
    """
    named = config.run.dry_run_hardware or kind_of(device)
    if named is None:
        return Forecast(None, f"no time is predicted: {device} is not among the known GPUs")
    try:
        seconds = compared(setting_of(config, shape, world_size, read_hardware(named)).times())
    except ValueError as error:
        return Forecast(None, f"no time is predicted: {error}")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != STEP)
    return Forecast(seconds, f"predicted by {named}: {seconds[STEP]:.2f} s per step ({parts})")


def compared(times: StepTimes) -> dict[str, float]:
    """Return the seconds as a run measures them; for sampling ahead, the time that a step waits for it."""
    training = times.log_probs + times.update + times.switching
    waiting = times.total - training - times.weights - times.other
    return {SAMPLING: max(0.0, waiting), TRAINING: training, WEIGHTS: times.weights, STEP: times.total}


# ------------------------------------------------------------------------------------ search for a layout

SIZES = (1, 2, 4, 8)
"""Sizes of tensor and pipeline parallelism; context parallelism and engines may also have 16."""
SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs for engines with their own GPUs."""
STALENESS = (0, 1, 4)
"""Steps that engines with their own GPUs sample ahead."""
_RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")
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
        for trainer, size, staleness in product(trainers, (*SIZES, 16), STALENESS if engine_gpus else (0,)):
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
    experts = (*SIZES, 16, 32, 64) if shape.is_moe else (1,)
    for tensor, pipeline, context, expert in product(SIZES, SIZES, (*SIZES, 16), experts):
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
        for recompute, offload in product(_RECOMPUTE, (False, True)):
            model = replace(config.model, recompute_granularity=recompute)
            optimizer = replace(
                config.optimizer, optimizer_cpu_offload=offload, use_precision_aware_optimizer=offload
            )
            yield replace(config, parallel=parallel, model=model, optimizer=optimizer)
