"""Calibration: the coefficients of this machine under which predictions equal a few measured steps.

On processors a tiny model spends its time starting operations, which no data sheet covers. Steps of two sizes
separate a layer's least cost from the further cost per token.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from scipy.optimize import least_squares

from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelShape
from megatron_ibpo.plan.hardware import Hardware
from megatron_ibpo.plan.machine import Coefficients, Fitted, Machine, Seen, workload_of
from megatron_ibpo.plan.prediction import compared, setting_of
from megatron_ibpo.plan.roofline import GIB
from megatron_ibpo.plan.workload import recorded
from megatron_ibpo.report.stages import SAMPLING, STEP, TRAINING, WEIGHTS, measured_seconds

_QUANTILES = 16
"""Quantiles of response lengths to store in a machine's file."""
_MATRIX = 768
"""Rows and columns of the timed product."""
_COPIED_BYTES = 64 * 1024**2
_LEAST = 1e-4
"""Shortest measured time in seconds; less counts as this much."""
_NUDGE = 1e-3
"""Change of a coefficient's logarithm for measuring slopes."""
_WHOLE = Coefficients(
    matmul=1, experts=1, attention=1, memory=1, link=1, train_layer=0, prefill=1, engine_layer=0,
    engine_sequence=0, update=1, host=1, step=0, loop=1,
)  # fmt: skip
"""Coefficients to start from: measured rates are reached, and overheads are zero."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one trainer's threads, alone on the machine."""

    matmul: float
    """Operations per second of products in fp32."""
    copy: float
    """Bytes per second read and written."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step of a run: its seconds and its work."""

    seconds: Mapping[str, float]
    """Seconds by the names of `report.stages`."""
    prompts: int
    seen: Seen


def measured_step(
    by_stage: Mapping[str, float], groups: Sequence[Group], tokens_trained: float
) -> MeasuredStep:
    """Return the seconds and the work of a step.

    Args:
        by_stage: seconds, as the loop counts them.
        groups: sampled groups with their corrections.
        tokens_trained: tokens in training, prompts included.
    """
    row = {"kind": "step", "seconds": by_stage}
    seconds = measured_seconds([row, row])  # the first step is always left out
    assert seconds is not None
    responses = [sample for group in groups for sample in group.responses]
    corrections = [correction.response for group in groups for correction in group.corrections]
    lengths = [len(sample.token_ids) for sample in responses]
    prompt = float(np.mean([len(sample.prompt_token_ids) for sample in responses]))
    beyond = [len(sample.prompt_token_ids) - prompt for sample in corrections]
    share = len(corrections) / len(responses)
    everything = len(responses) * (prompt + float(np.mean(lengths))) * (1 + share)
    return MeasuredStep(
        seconds=seconds,
        prompts=len(groups),
        seen=Seen(
            responses=tuple(recorded(lengths, _QUANTILES).tolist()),
            prompt=prompt,
            corrections=share,
            correction_prompt=float(np.mean(beyond)) if beyond else 0.0,
            trained=tokens_trained / everything,
        ),
    )


def measure_rates(clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Time products and copies for about a second, with this thread's share of the processors."""
    matrix = torch.rand(_MATRIX, _MATRIX)
    whole = torch.zeros(_COPIED_BYTES // 4)
    target = torch.empty_like(whole)
    product = _seconds_of(lambda: matrix @ matrix, clock)
    copy = _seconds_of(lambda: target.copy_(whole), clock)
    return Rates(matmul=2 * _MATRIX**3 / product, copy=2 * _COPIED_BYTES / copy)


def _seconds_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest of eight times."""
    found = []
    for _ in range(8):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


def calibrated(
    steps: Sequence[MeasuredStep],
    rates: Rates,
    config: Config,
    shape: ModelShape,
    world_size: int,
    *,
    about: str,
) -> Machine:
    """Return the machine on which predictions equal the seconds of these steps.

    Args:
        steps: steps of two sizes; the median step of each size counts, with its own work.
        config: resolved configuration of the run.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError("no step had anything to train on, so training could not be timed")
    hardware = _hardware(rates, world_size, about)
    chosen = _middle_of_each_size(steps)

    def predicted(reached: Coefficients, name: str) -> list[float]:
        known = Fitted(reached, {})
        return [
            compared(
                setting_of(
                    _of_size(config, step.prompts),
                    shape,
                    world_size,
                    Machine(hardware=hardware, known=known, seen=step.seen),
                ).times()
            )[name]
            for step in chosen
        ]

    def fit(name: str, of: Callable[[Sequence[float]], Coefficients], start: Sequence[float]) -> Coefficients:
        taken = [max(_LEAST, step.seconds[name]) for step in chosen]
        return of(_nearest(lambda values: predicted(of(values), name), start, taken))

    def sampling(values: Sequence[float]) -> Coefficients:
        return replace(_WHOLE, engine_layer=values[0], engine_sequence=values[1])

    engines = fit(SAMPLING, sampling, (1e-3, 1e-4))

    def training(values: Sequence[float]) -> Coefficients:
        layer, share = values
        computing = dict.fromkeys(("matmul", "experts", "attention"), share)
        return replace(engines, train_layer=layer, **computing)

    trainers = fit(TRAINING, training, (1e-3, 0.1))
    taken = [max(_LEAST, step.seconds[WEIGHTS]) for step in chosen]
    sent = float(np.median(np.divide(predicted(trainers, WEIGHTS), taken)))
    rest = [2 * step.seconds[STEP] - sum(step.seconds.values()) for step in chosen]
    reached = replace(trainers, update=sent, step=max(0.0, float(np.median(rest))))
    return Machine(
        hardware=hardware,
        known=Fitted(reached, {}),
        workload=workload_of(config, shape, world_size),
        seen=_all_seen([step for step in steps if step.prompts == chosen[-1].prompts]),
    )


def _hardware(rates: Rates, world_size: int, about: str) -> Hardware:
    return Hardware(
        name="here",
        about=about,
        source="measured on this machine; its memory is divided among the trainers",
        memory_gib=psutil.virtual_memory().total / GIB / world_size,
        memory_bandwidth=rates.copy,
        peak_bf16=rates.matmul,
        peak_fp8=rates.matmul,
        linked=world_size,
        link=rates.copy,
        network=rates.copy,
        host_link=rates.copy,
        starts_ahead=False,
    )


def _of_size(config: Config, prompts: int) -> Config:
    """Return the configuration with this many prompts per step and the measured lengths."""
    return replace(
        config,
        rollout=replace(config.rollout, rollout_batch_size=prompts, max_staleness=0),
        run=replace(config.run, dry_run_response_len=None),
    )


def _middle_of_each_size(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the median step of each size, smallest size first."""
    sizes = sorted({step.prompts for step in steps})
    by_time = sorted(steps, key=lambda step: step.seconds[STEP])
    alike = [[step for step in by_time if step.prompts == size] for size in sizes]
    return [own[len(own) // 2] for own in alike]


def _all_seen(steps: Sequence[MeasuredStep]) -> Seen:
    """Return the mean work of steps."""
    seen = [step.seen for step in steps]

    def mean(name: str) -> float:
        return float(np.mean([getattr(own, name) for own in seen]))

    return Seen(
        responses=tuple(np.mean([own.responses for own in seen], axis=0).tolist()),
        prompt=mean("prompt"),
        corrections=mean("corrections"),
        correction_prompt=mean("correction_prompt"),
        trained=mean("trained"),
    )


def _nearest(
    predict: Callable[[Sequence[float]], Sequence[float]], start: Sequence[float], measured: Sequence[float]
) -> list[float]:
    """Return the positive values whose predictions are nearest to the measured seconds, both in logarithms. A
    value that affects no step keeps its start."""
    target = np.log(measured)

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(point).tolist())) - target

    # wider than the last bits of a double, since simulated times have jumps
    return np.exp(least_squares(residuals, np.log(start), diff_step=_NUDGE).x).tolist()
