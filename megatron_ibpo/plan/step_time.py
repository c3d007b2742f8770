"""Seconds of a step of reinforcement learning, by stage: sampling, log-probs, the update, the weights' way to
the engines, and what colocation and staleness change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_ibpo.models import ModelShape
from megatron_ibpo.models.cost import weight_count
from megatron_ibpo.plan.efficiencies import Efficiencies
from megatron_ibpo.plan.fleet import Fleet, bound
from megatron_ibpo.plan.hardware import Hardware
from megatron_ibpo.plan.lengths import median_length, shuffled
from megatron_ibpo.plan.sampling_time import Engine, Sampled, sample
from megatron_ibpo.plan.simulated_engines import StepTime
from megatron_ibpo.plan.training_time import Batch, Layout, PassTime, own_parameters, own_state, pass_time

_MOVED_BYTES = 14
"""Of a parameter that a colocated trainer moves out and in again: weight, master weight and two means."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a step has to do, whatever does it."""

    responses: Sequence[float] | np.ndarray
    """Tokens of all responses of a step, in any order; quantiles will do."""
    count: int
    """Responses of a step."""
    prompt: float = 0.0
    """Tokens of a prompt."""
    group: int = 1
    """Responses to each prompt."""
    corrections: float = 0.0
    """Corrections for each response, written in a second phase behind it, of the same lengths."""
    correction_prompt: float = 0.0
    """Tokens that a correction's prompt has beyond a response's: the responses that it shows."""
    streamed: bool = True
    """Corrections of a group are asked for as soon as it is scored, while others still run."""
    updates: int = 1
    """Optimizer steps."""
    passes_without_gradient: float = 1.0
    """Forward passes for log-probs, of old and reference policy, over what is trained on."""
    reward_seconds: float = 0.0
    """Of one response on one verifier."""
    verifiers: int = 1
    staleness: int = 0
    trained: float = 1.0
    """Tokens that are trained on, over those of responses and corrections, each with a prompt."""

    @property
    def batch(self) -> Batch:
        """What the update goes over: responses and corrections."""
        lengths = np.asarray(self.responses, np.float64)
        asked = self.count * (1 + self.corrections)
        return Batch.of(lengths + self.prompt).scaled(self.trained * asked / len(lengths))


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Predicted seconds of a step by stage. On GPUs of their own, engines and trainers work at the same time:
    `total` is then less than the sum."""

    sampling: float
    corrections: float
    rewards: float
    """Beyond what sampling hides."""
    log_probs: float
    update: float
    weights: float
    switching: float
    """State of colocated trainers and engines on its way to main memory and back."""
    other: float
    total: float
    bound: dict[str, str]
    """Stage → what takes most of it."""
    sampled: Sampled
    corrected: Sampled
    """What an engine took for its corrections, of which `corrections` is what came after its responses."""
    passes: PassTime
    fleet: Fleet | None = None
    """What the streaming loop leads, where engines sample ahead; None elsewhere."""

    def stages(self) -> dict[str, float]:
        """In the order of a step."""
        names = ("sampling", "corrections", "rewards", "log_probs", "update", "weights", "switching", "other")
        return {name: getattr(self, name) for name in names}


def step_times(
    shape: ModelShape,
    layout: Layout,
    engine: Engine,
    task: Task,
    hardware: Hardware,
    reached: Efficiencies,
    *,
    engine_gpus: int,
    colocated: bool,
    transport: str | None = None,
) -> StepTimes:
    """One step in the steady state.

    Args:
        engine_gpus: of all engines; the trainer's own where colocated.
        transport: gathered, resharded or ipc; by default ipc where colocated and gathered elsewhere.

    Raises:
        ValueError: an engine does not hold weights and a sequence.
    """
    reached = reached.within_a_loop()
    engine = replace(engine, reached=engine.reached.within_a_loop())
    engines = max(1, engine_gpus // engine.tensor)
    lengths = shuffled(np.asarray(task.responses, np.float64))
    first = _sample(engine, lengths, task, engines, task.count, task.prompt)
    second = _sample(
        engine,
        lengths,
        replace(task, group=1),
        engines,
        round(task.count * task.corrections),
        task.prompt + task.correction_prompt,
    )
    mean = float(lengths.mean())
    without = replace(layout, recompute="none")
    scoring = pass_time(shape, without, hardware, reached, task.batch, backward=False)
    passes = pass_time(shape, layout, hardware, reached, task.batch, steps=task.updates)
    log_probs = task.passes_without_gradient * scoring.total
    weights = update_seconds(
        shape,
        hardware,
        reached,
        transport=transport or ("ipc" if colocated else "gathered"),
        engine_tensor=engine.tensor,
        gpus=layout.gpus + (0 if colocated else engine_gpus),
    )
    switching = _switching(shape, layout, hardware, reached) if colocated else 0.0
    corrections = second.seconds - (min(first.tail, second.seconds) if task.streamed else 0.0)
    rewards = max(
        0.0,
        task.reward_seconds * task.count * (1 + task.corrections) / task.verifiers
        - first.seconds
        - corrections,
    )
    sampling = first.seconds + corrections + rewards
    training = log_probs + passes.total
    total = sampling + training + weights + switching + reached.step
    fleet = None
    if not colocated and task.staleness:
        # what no schedule beats; docs/scale.md and tests/test_bench_async.py: how near the loop comes
        fleet = _fleet(engine, engines, task, first, second, training, weights, mean)
        tokens = (first.tokens + second.tokens) * engines
        total = bound(fleet, task.staleness, tokens).seconds + reached.step
    return StepTimes(
        sampling=first.seconds,
        corrections=corrections,
        rewards=rewards,
        log_probs=log_probs,
        update=passes.total,
        weights=weights,
        switching=switching,
        other=reached.step,
        total=total,
        bound={
            "sampling": _sampling_bound(engine, first, task.prompt, mean),
            "log_probs": scoring.largest(),
            "update": passes.largest(),
        },
        sampled=first,
        corrected=second,
        passes=passes,
        fleet=fleet,
    )


def update_seconds(
    shape: ModelShape,
    hardware: Hardware,
    reached: Efficiencies,
    *,
    transport: str,
    engine_tensor: int,
    gpus: int,
) -> float:
    """A weight update. gathered: every tensor whole to all engines at once. resharded: to each GPU its part.
    ipc: to each GPU its part, on its own node.

    Args:
        gpus: of trainers and engines.

    Raises:
        ValueError: another transport.
    """
    whole, rate = 2 * weight_count(shape).total, hardware.between(gpus)
    rates = {
        "gathered": (whole, rate * reached.gather),
        "resharded": (whole / engine_tensor, rate * reached.reshard),
        "ipc": (whole / engine_tensor, hardware.link * reached.ipc),
    }
    if transport not in rates:
        raise ValueError(f"no transport {transport!r}; there are {', '.join(rates)}")
    sent, rate = rates[transport]
    return sent / rate


def checkpoint_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, reached: Efficiencies) -> float:
    """That training waits for a checkpoint: each rank copies its weights and its optimizer's state into main
    memory. Writing them goes on beside training."""
    return _movable_bytes(shape, layout) / (hardware.host_link * reached.host)


def _sample(
    engine: Engine, lengths: np.ndarray, task: Task, engines: int, count: int, prompt: float
) -> Sampled:
    """The engine that has its even share; groups are dealt out whole."""
    own = -(-count // engines)
    if own == 0:
        return sample(engine, ())
    repeats = -(-own // len(lengths))
    mine = np.tile(lengths, repeats)[: own * repeats]
    # an even cut through the quantiles, so that the share has the same distribution as the whole
    picked = shuffled(np.sort(mine)[np.linspace(0, len(mine) - 1, own).round().astype(int)])
    if float(lengths.mean()) >= 1:
        picked = picked * (lengths.mean() / picked.mean())
    return sample(engine, picked, prompt=prompt, group=task.group)


def _switching(shape: ModelShape, layout: Layout, hardware: Hardware, reached: Efficiencies) -> float:
    return 2 * _movable_bytes(shape, layout) / (hardware.host_link * reached.host)


def _movable_bytes(shape: ModelShape, layout: Layout) -> float:
    """Weights, and state of the optimizer, that a rank has on its GPU."""
    dense, experts = own_parameters(shape, layout)
    own = (dense + experts) * (2 / (layout.copies if layout.fsdp else 1))
    return own if layout.offload_optimizer else own + (_MOVED_BYTES - 2) * own_state(shape, layout)


def _fleet(
    engine: Engine,
    engines: int,
    task: Task,
    first: Sampled,
    second: Sampled,
    training: float,
    weights: float,
    mean: float,
) -> Fleet:
    """Engines and trainer at work together, as `plan.fleet` has them."""
    context = task.prompt + mean / 2
    full = min(first.slots, max(1, -(-task.count // engines)) * (task.staleness + 1))
    whole, part = engine.step_seconds(full, context), engine.step_seconds(max(1, full / 2), context)
    per_sequence = (whole - part) / max(1e-9, full - max(1, full / 2))
    reading = (first.prompts + second.prompts) / max(1.0, first.tokens + second.tokens)
    longest = float(np.max(task.responses))
    return Fleet(
        engines=engines,
        training_seconds=training,
        pause_seconds=weights,
        step_time=StepTime(max(1e-9, whole - per_sequence * full), per_sequence + reading),
        most_running=full,
        groups=max(1, task.count // task.group),
        group_size=task.group,
        longest=round(longest),
        median_length=median_length(mean, longest),
    )


def _sampling_bound(engine: Engine, sampled: Sampled, prompt: float, mean: float) -> str:
    if sampled.tail > sampled.seconds / 2:
        return "the longest responses"
    if sampled.prompts > sampled.seconds / 2:
        return "prompts"
    running = max(1.0, sampled.mean_running)
    whole = engine.step_seconds(running, prompt + mean / 2)
    caches = whole - engine.step_seconds(running, 0)
    parts = {
        "caches": caches,
        "sequences' overhead": running * engine.reached.engine_sequence,
        "layers' overhead": engine.shape.num_layers * engine.reached.engine_layer,
    }
    parts["weights"] = whole - sum(parts.values())
    return max(parts, key=parts.__getitem__)
