"""The predicted time of a run: seconds per step by stage, GPU-hours, and changes that would help. And its
forecast before its first step, in the stages that a run measures."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_ibpo.config import Config
from megatron_ibpo.credit import find_operator
from megatron_ibpo.engines.registry import engine_needs
from megatron_ibpo.models import ModelShape
from megatron_ibpo.plan.hardware import kind_of
from megatron_ibpo.plan.machine import Machine, Seen, find_machine, workload_of
from megatron_ibpo.plan.roofline import checkpoint_seconds
from megatron_ibpo.plan.step_time import StepTimes, step_times
from megatron_ibpo.plan.workload import Basis, Engine, Layout, Task, log_normal, recorded
from megatron_ibpo.policy.overrides import read_overrides
from megatron_ibpo.report.stages import SAMPLING, STEP, TRAINING, WEIGHTS, Forecast

WRONG = 0.5
"""Assumed share of wrong responses; each is corrected --ibpo-corrections times."""
_POINTS = 512
"""Quantiles that represent the lengths of a step's responses."""
_PROMPT = 200
"""Assumed tokens of a prompt: a question of mathematics."""
_UNKNOWN_FACTOR = 2.0
"""90 % error factor to show for a calibrated machine."""


@dataclass(frozen=True)
class Setting:
    """All inputs of a prediction; alternatives change a part of it."""

    basis: Basis
    layout: Layout
    engine: Engine
    most_running_flag: str
    """Flag for the engine's largest number of sequences at once."""
    task: Task
    engine_gpus: int
    colocated: bool
    factor: float
    """90 % error factor of a step's time."""

    def times(self) -> StepTimes:
        """Return the times of a step.

        Raises:
            ValueError: an engine cannot hold the weights and a sequence.
        """
        return step_times(
            self.basis,
            self.layout,
            self.engine,
            self.task,
            engine_gpus=self.engine_gpus,
            colocated=self.colocated,
        )

    @property
    def gpus(self) -> int:
        """GPUs of trainers and engines."""
        return self.layout.gpus + (0 if self.colocated else self.engine_gpus)


@dataclass(frozen=True)
class Change:
    """Another setting of a flag."""

    flag: str
    seconds: float
    """Seconds per step with it."""


def setting_of(config: Config, shape: ModelShape, world_size: int, machine: Machine) -> Setting:
    """Return the setting of a configuration whose device and context are resolved (`plan.feasibility`).

    Args:
        machine: machine to predict for.

    Raises:
        ValueError: a mean length exceeds the longest.
    """
    rollout, needs, known = config.rollout, engine_needs(config), machine.known
    engine = Engine(
        tensor=rollout.rollout_num_gpus_per_engine,
        memory_share=needs.memory_share,
        most_running=needs.most_running,
    )
    return Setting(
        basis=Basis(shape=shape, hardware=machine.hardware, reached=known.coefficients),
        layout=_layout_of(config, world_size),
        engine=engine,
        most_running_flag=needs.most_running_flag,
        task=task_of(config, machine.seen),
        engine_gpus=world_size if rollout.colocate else rollout.rollout_num_gpus or world_size,
        colocated=rollout.colocate,
        factor=known.error.get("step", _UNKNOWN_FACTOR),
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


def task_of(config: Config, seen: Seen | None = None) -> Task:
    """Return the work of a step, with measured lengths or usual ones.

    Raises:
        ValueError: a mean length exceeds the longest.
    """
    rollout, longest = config.rollout, config.rollout.rollout_max_response_len
    asked = config.run.dry_run_response_len
    mean = asked or max(1, longest // 2)
    if mean > longest:
        raise ValueError(f"--dry-run-response-len={mean} exceeds --rollout-max-response-len={longest}")
    operator = find_operator(config.algorithm)
    corrections = operator.ibpo_corrections * WRONG
    task = Task(
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
    if seen is None:
        return task
    return replace(
        task,
        responses=task.responses if asked else np.minimum(recorded(seen.responses, _POINTS), longest),
        prompt=seen.prompt,
        corrections=seen.corrections,
        correction_prompt=seen.correction_prompt,
        trained=seen.trained,
    )


def changes(setting: Setting, most: int = 3) -> list[Change]:
    """Return the single changes that would save most time, best first. Memory is not checked."""
    before = setting.times().total
    found = []
    for flag, other in _others(setting):
        try:
            seconds = other.times().total
        except ValueError:  # an engine cannot hold it
            continue
        if seconds < 0.99 * before:
            found.append(Change(flag, seconds))
    return sorted(found, key=lambda change: change.seconds)[:most]


def _others(setting: Setting) -> Iterator[tuple[str, Setting]]:
    layout, engine, task = setting.layout, setting.engine, setting.task
    if layout.recompute != "none":
        yield "--recompute-granularity none", replace(setting, layout=replace(layout, recompute="none"))
    if layout.offload_optimizer:
        yield (
            "--no-optimizer-cpu-offload",
            replace(setting, layout=replace(layout, offload_optimizer=False)),
        )
    for tensor in (layout.tensor // 2, layout.tensor * 2):
        ranks = tensor * layout.pipeline * layout.context
        if 1 <= tensor <= setting.basis.hardware.linked and layout.gpus % ranks == 0:
            yield (
                f"--tensor-model-parallel-size {tensor}",
                replace(setting, layout=replace(layout, tensor=tensor)),
            )
    for tensor in (engine.tensor // 2, engine.tensor * 2):
        if tensor >= 1 and setting.engine_gpus % tensor == 0 and tensor <= setting.basis.hardware.linked:
            yield (
                f"--rollout-num-gpus-per-engine {tensor}",
                replace(setting, engine=replace(engine, tensor=tensor)),
            )
    if engine.most_running < 1024:
        yield (
            f"{setting.most_running_flag} {2 * engine.most_running}",
            replace(setting, engine=replace(engine, most_running=2 * engine.most_running)),
        )
    if layout.precision == "bf16" and setting.basis.hardware.peak_fp8 > setting.basis.hardware.peak_bf16:
        yield "--model-override fp8=hybrid", replace(setting, layout=replace(layout, precision="fp8"))
    if not setting.colocated and task.staleness < 4:
        staleness = task.staleness + 1
        yield f"--max-staleness {staleness}", replace(setting, task=replace(task, staleness=staleness))
    if task.corrections:
        yield "--ibpo-corrections 0", replace(setting, task=replace(task, corrections=0.0))


def lines(setting: Setting, steps: int, price: float | None = None) -> list[str]:
    """Return the prediction in lines for users.

    Args:
        steps: steps of the whole run.
        price: price of a GPU-hour, in any currency.
    """
    times, factor = setting.times(), setting.factor
    total, tokens = times.total, setting.task.count * float(np.mean(setting.task.responses))
    hours = total * steps * setting.gpus / 3600
    said = [
        f"a step: {_seconds(total)}, between {_seconds(total / factor)} and {_seconds(total * factor)}; "
        f"{tokens / total / setting.gpus:,.0f} response tokens per second and GPU"
    ]
    for stage, seconds in times.stages().items():
        if seconds >= 0.005 * total:
            what = times.bound.get(stage)
            said.append(f"  {stage.replace('_', '-')}: {_seconds(seconds)}{f' ({what})' if what else ''}")
    if not setting.colocated and setting.task.staleness:
        said.append("  engines and trainers work at the same time: a step takes less than the sum")
    sampled = times.sampled
    said.append(
        f"an engine runs {sampled.mean_running:.0f} sequences on average, of {sampled.slots} slots; "
        f"{100 * sampled.tail / max(sampled.seconds, 1e-9):.0f} % of sampling waits for the longest responses"
    )
    copying = checkpoint_seconds(setting.basis, setting.layout)
    said.append(
        f"a checkpoint: training waits {_seconds(copying)} for its copy in main memory, "
        "which is written while training goes on"
    )
    cost = "" if price is None else f", {hours * price:,.0f} at {price:g} per hour"
    said.append(f"the run of {steps} steps: {hours:,.0f} GPU-hours{cost}")
    better = changes(setting)
    said += [f"would help: {change.flag}, {_seconds(change.seconds)} per step" for change in better]
    return said


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def forecast(config: Config, shape: ModelShape, world_size: int, device: str) -> Forecast:
    """Return the forecast of a run whose configuration is resolved.

    Args:
        device: name of the device that its trainers compute on.
    """
    named = config.run.dry_run_hardware or kind_of(device)
    if named is None:
        why = f"{device} is not among the known GPUs; `ibpo calibrate` measures a machine"
        return Forecast(None, f"no time is predicted: {why}")
    try:
        machine, own = find_machine(named), workload_of(config, shape, world_size)
        if machine.workload not in (None, own):
            raise ValueError(f"{named} was measured with {machine.workload}, but this run is {own}")
        seconds = compared(setting_of(config, shape, world_size, machine).times())
    except ValueError as error:
        return Forecast(None, f"no time is predicted: {error}")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != STEP)
    return Forecast(seconds, f"predicted by {named}: {seconds[STEP]:.2f} s per step ({parts})")


def compared(times: StepTimes) -> dict[str, float]:
    """Return the seconds as a run measures them; for sampling ahead, the time that a step waits for it."""
    training = times.log_probs + times.update + times.switching
    waiting = times.total - training - times.weights - times.other
    return {SAMPLING: max(0.0, waiting), TRAINING: training, WEIGHTS: times.weights, STEP: times.total}
