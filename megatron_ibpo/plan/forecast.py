"""The forecast of a run before its first step, in the stages that a run measures."""

from dataclasses import replace

from megatron_ibpo.config import Config
from megatron_ibpo.models import ModelShape
from megatron_ibpo.plan.hardware import kind_of
from megatron_ibpo.plan.machine import find_machine, workload_of
from megatron_ibpo.plan.prediction import setting_of
from megatron_ibpo.plan.step_time import StepTimes
from megatron_ibpo.report.prediction_error import SAMPLING, STEP, TRAINING, WEIGHTS, Forecast


def forecast(config: Config, shape: ModelShape, world_size: int, device: str) -> Forecast:
    """Return the forecast of a run whose configuration is resolved.

    Args:
        device: name of the device that its trainers compute on.
    """
    named = config.run.dry_run_hardware or kind_of(device)
    if named is None:
        why = f"{device} is not among the known GPUs; `ibpo calibrate` measures a machine"
        return Forecast(None, f"no time is predicted: {why}")
    config = replace(config, run=replace(config.run, dry_run_hardware=named))
    try:
        measured_with, own = find_machine(named).workload, workload_of(config, shape, world_size)
        if measured_with not in (None, own):
            raise ValueError(f"{named} was measured with {measured_with}, but this run is {own}")
        seconds = compared(setting_of(config, shape, world_size).times())
    except ValueError as error:
        return Forecast(None, f"no time is predicted: {error}")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != STEP)
    return Forecast(seconds, f"predicted by {named}: {seconds[STEP]:.2f} s per step ({parts})")


def compared(times: StepTimes) -> dict[str, float]:
    """Return the seconds as a run measures them; for sampling ahead, the time that a step waits for it."""
    training = times.log_probs + times.update + times.switching
    waiting = times.total - training - times.weights - times.other
    return {
        SAMPLING: max(0.0, waiting),
        TRAINING: training,
        WEIGHTS: times.weights,
        STEP: times.total,
    }
