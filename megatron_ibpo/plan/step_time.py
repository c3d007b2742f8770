"""Seconds of a step of reinforcement learning: stages by the roofline, one after the other or in parallel.

Stages of a step add up. Engines that sample ahead work in parallel with the trainer: the slower of both
counts, and several steps share the wait for the longest response.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megatron_ibpo.plan.roofline import checkpoint_seconds, decode_seconds, pass_time, sample, update_seconds
from megatron_ibpo.plan.workload import Basis, Engine, Layout, PassTime, Sampled, Task, stand_ins


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
    passes: PassTime
    """One epoch of the update."""

    def stages(self) -> dict[str, float]:
        """Return the seconds by stage, in the order of a step."""
        names = ("sampling", "corrections", "log_probs", "update", "weights", "switching", "other")
        return {name: getattr(self, name) for name in names}


def step_times(
    basis: Basis,
    layout: Layout,
    engine: Engine,
    task: Task,
    *,
    engine_gpus: int,
    colocated: bool,
    transport: Literal["gathered", "resharded", "ipc"] | None = None,
) -> StepTimes:
    """Return the times of one step in the steady state.

    Args:
        engine_gpus: GPUs of all engines; the trainer's own if colocated.
        transport: kind of weight update; None: ipc if colocated, otherwise gathered.

    Raises:
        ValueError: an engine cannot hold the weights and a sequence.
    """
    basis = replace(basis, reached=basis.reached.within_a_loop())
    engines = max(1, engine_gpus // engine.tensor)
    ahead = task.staleness > 0 and not colocated
    stream = task.staleness + 1 if ahead else 1
    first = _phase(basis, engine, task, task.count / engines, task.prompt, task.group, stream)
    prompt_tokens = task.prompt + task.correction_prompt
    second = _phase(basis, engine, task, task.count * task.corrections / engines, prompt_tokens, 1, stream)
    corrections = second.seconds - min(first.tail, second.seconds)
    scoring = pass_time(basis, replace(layout, recompute="none"), task.batch, backward=False)
    passes = pass_time(basis, layout, task.batch, steps=task.updates)
    log_probs = task.passes_without_gradient * scoring.total
    update = task.epochs * passes.total
    weights = update_seconds(
        basis,
        transport or ("ipc" if colocated else "gathered"),
        engine_tensor=engine.tensor,
        gpus=layout.gpus + (0 if colocated else engine_gpus),
    )
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
        passes=passes,
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
