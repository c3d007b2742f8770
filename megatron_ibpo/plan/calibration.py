"""A machine's figures from a few steps of a run: what its overheads must be for predictions to be right.

On processors a tiny model's time goes into starting operations, which no data sheet has. Steps of two sizes
tell what a layer costs at least, and what a token costs beyond that.
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
from megatron_ibpo.plan.efficiencies import Efficiencies, Fitted
from megatron_ibpo.plan.forecast import compared
from megatron_ibpo.plan.hardware import Hardware
from megatron_ibpo.plan.lengths import recorded
from megatron_ibpo.plan.machine import Machine, Seen, workload_of
from megatron_ibpo.plan.prediction import setting_of
from megatron_ibpo.plan.sampling_time import GIB
from megatron_ibpo.report.prediction_error import SAMPLING, STEP, TRAINING, WEIGHTS, measured_seconds

_QUANTILES = 16
_MATRIX = 768
"""Rows and columns of the products that are timed."""
_COPIED_BYTES = 64 * 1024**2
_LEAST = 1e-4
"""Seconds: what takes less is not told from nothing."""
_NUDGE = 1e-3
"""Of a parameter's logarithm, to see what predictions make of it."""
_WHOLE = Efficiencies(
    matmul=1, matmul_fp8=1, experts=1, attention=1, elementwise=1, link=1, routing=1, decode=1, prefill=1,
    train_layer=0, engine_layer=0, engine_tensor=0, engine_sequence=0, engine_request=0, gather=1, reshard=1,
    ipc=1, host=1, host_adam=1e30, step=0,
)  # fmt: skip
"""All that was measured is reached, until steps say otherwise."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one trainer's threads reach, alone on the machine."""

    matmul: float
    """Operations per second of products in fp32."""
    copy: float
    """Bytes per second that are read and written."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step of a run: what it took and what it had to do."""

    seconds: Mapping[str, float]
    """By the names of `report.prediction_error`."""
    prompts: int
    seen: Seen


def measured_step(
    by_stage: Mapping[str, float], groups: Sequence[Group], tokens_trained: float
) -> MeasuredStep:
    """
    Args:
        by_stage: seconds, as the loop counts them.
        groups: what was sampled and corrected.
        tokens_trained: prompts included.
    """
    row = {"kind": "step", "seconds": by_stage}
    seconds = measured_seconds([row, row])  # of steps the first is left out
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
    """A second's worth of products and copies, in this thread's share of the processors."""
    matrix = torch.rand(_MATRIX, _MATRIX)
    whole = torch.zeros(_COPIED_BYTES // 4)
    target = torch.empty_like(whole)
    product = _seconds_of(lambda: matrix @ matrix, clock)
    copy = _seconds_of(lambda: target.copy_(whole), clock)
    return Rates(matmul=2 * _MATRIX**3 / product, copy=2 * _COPIED_BYTES / copy)


def _seconds_of(work: Callable[[], object], clock: Callable[[], float], times: int = 8) -> float:
    """The shortest of several."""
    found = []
    for _ in range(times):
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
    """The machine on which predictions are what these steps took.

    Args:
        steps: of two sizes; of each the one that took the middle time counts, with what it had to do.
        config: of the run, all of it resolved.

    Raises:
        ValueError: there are none.
    """
    if not steps:
        raise ValueError("no step had anything to train on, so that nothing is known of training")
    hardware = _hardware(rates, world_size, about)
    chosen = _middle_of_each_size(steps)

    def predicted(reached: Efficiencies, name: str) -> list[float]:
        known = Fitted(reached, {}, {})
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

    def fit(name: str, of: Callable[[Sequence[float]], Efficiencies], start: Sequence[float]) -> Efficiencies:
        taken = [max(_LEAST, step.seconds[name]) for step in chosen]
        return of(_nearest(lambda values: predicted(of(values), name), start, taken))

    def sampling(values: Sequence[float]) -> Efficiencies:
        return replace(_WHOLE, engine_layer=values[0], engine_sequence=values[1])

    engines = fit(SAMPLING, sampling, (1e-3, 1e-4))

    def training(values: Sequence[float]) -> Efficiencies:
        layer, share = values
        computing = dict.fromkeys(("matmul", "matmul_fp8", "experts", "attention", "elementwise"), share)
        return replace(engines, train_layer=layer, **computing)

    trainers = fit(TRAINING, training, (1e-3, 0.1))
    taken = [max(_LEAST, step.seconds[WEIGHTS]) for step in chosen]
    sent = float(np.median(np.divide(predicted(trainers, WEIGHTS), taken)))
    rest = [2 * step.seconds[STEP] - sum(step.seconds.values()) for step in chosen]
    reached = replace(trainers, ipc=sent, gather=sent, reshard=sent, step=max(0.0, float(np.median(rest))))
    return Machine(
        hardware=hardware,
        known=Fitted(reached, {}, {}),
        workload=workload_of(config, shape, world_size),
        seen=_all_seen([step for step in steps if step.prompts == chosen[-1].prompts]),
    )


def _hardware(rates: Rates, world_size: int, about: str) -> Hardware:
    return Hardware(
        name="here",
        about=about,
        source="measured on this machine, of whose memory each trainer has a share",
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
    """As many prompts a step, of the lengths that were seen."""
    return replace(
        config,
        rollout=replace(config.rollout, rollout_batch_size=prompts, max_staleness=0),
        run=replace(config.run, dry_run_response_len=None),
    )


def _middle_of_each_size(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Smallest first."""
    sizes = sorted({step.prompts for step in steps})
    by_time = sorted(steps, key=lambda step: step.seconds[STEP])
    alike = [[step for step in by_time if step.prompts == size] for size in sizes]
    return [own[len(own) // 2] for own in alike]


def _all_seen(steps: Sequence[MeasuredStep]) -> Seen:
    """What they had on average."""
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
    """Parameters above 0 under which predictions are nearest to what was measured, both in logarithms; one
    that no step moves stays where it began."""
    target = np.log(measured)

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(point).tolist())) - target

    # a wider difference than the last bits of a double, since simulated times have steps
    return np.exp(least_squares(residuals, np.log(start), diff_step=_NUDGE).x).tolist()
