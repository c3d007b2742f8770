"""Measure this machine with a few steps of a run, so that the run itself can be predicted.

    bash tools/ibpo.sh calibrate FLAGS…

The flags are those of `train`, with --dry-run-hardware naming the file to write (NAME.yaml). The run uses a
temporary directory; nothing is saved or evaluated. `train` with the same flags predicts at its start how long
a step takes, and at its end compares this with the measured time (docs/planner.md).
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ibpo.basics.entry_point import command
from megatron_ibpo.basics.records import Group
from megatron_ibpo.config import COMMON_FLAGS, Config, ConfigError
from megatron_ibpo.data.hub import with_local_copies
from megatron_ibpo.run.checks import check_installed, check_settings
from megatron_ibpo.run.settings import parse_config

if TYPE_CHECKING:
    from megatron_ibpo.plan.calibration import MeasuredStep
    from megatron_ibpo.run.state import Run

SMALL = 4
"""Small steps use a quarter of the prompts."""
EACH = 3
"""Steps of each size, after one warm-up step."""


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Measure as the flags say. Return the exit status."""
    config = parse_config(
        sys.argv[1:] if argv is None else argv,
        program="ibpo calibrate",
        description=str(__doc__),
        common=("dry_run_hardware", *(name for name in COMMON_FLAGS if name != "dry_run")),
    )
    with tempfile.TemporaryDirectory(prefix="ibpo-calibrate-") as scratch:
        config, path = settings_of(config, Path(scratch))
        check_settings(config)
        config = with_local_copies(config)
        calibrate(config, path)


def settings_of(config: Config, scratch: Path) -> tuple[Config, Path]:
    """Return (the configuration of the run, the file to write).

    Raises:
        ConfigError: no such file is named.
    """
    named = config.run.dry_run_hardware
    if named is None or not named.endswith(".yaml"):
        raise ConfigError("--dry-run-hardware: required, the file to write, NAME.yaml")
    run = replace(
        config.run,
        run_dir=scratch / "run",
        dry_run_hardware=None,
        save=False,
        load=None,
        load_debug_rollout_data=None,
        save_debug_rollout_data=False,
        keep_samples=0,
        debug_rollout_only=False,
        eval_num_prompts=0,
        operator_skill_prompts=0,
        use_wandb=False,
        use_trackio=False,
    )
    rollout = replace(config.rollout, max_staleness=0, over_sampling_batch_size=None)
    return replace(config, run=run, rollout=rollout), Path(named)


def calibrate(config: Config, path: Path) -> None:
    """Run the whole measurement and write the file."""
    check_installed()
    # imported late, so that wrong flags are reported at once
    from megatron_ibpo.plan.calibration import calibrated, measure_rates
    from megatron_ibpo.plan.machine import write_machine
    from megatron_ibpo.run.open import open_run

    rates = measure_rates()
    with ExitStack() as stack:
        run = stack.enter_context(open_run(config))
        steps = list(measured_steps(run))
        config, shape = run.config, run.foundation.shape
    world_size = config.cluster.num_trainers
    assert world_size is not None
    about = f"a machine measured on {date.today()}, in {len(steps)} steps of a run"
    machine = calibrated(steps, rates, config, shape, world_size, about=about)
    write_machine(machine, path)
    print(f"{path} is written; --dry-run-hardware takes it for runs of {machine.workload}")


def measured_steps(run: "Run") -> Iterator["MeasuredStep"]:
    """Yield whole steps and smaller ones in turn, without those that had nothing to train on."""
    from megatron_ibpo.plan.calibration import measured_step

    whole = run.config.rollout.rollout_batch_size
    _step(run)
    run.stages.take()
    for size in EACH * [max(1, whole // SMALL), whole]:
        groups, metrics = _step(_of_size(run, size))
        seconds = run.stages.take()
        if metrics["tokens_trained"]:
            yield measured_step(seconds, groups, metrics["tokens_trained"])


def _step(run: "Run") -> tuple[list[Group], dict[str, float]]:
    """Take one step as `train` does, without a report."""
    from megatron_ibpo.run import loop

    groups = loop.sample(run)
    metrics = loop.update(run, loop.credit(run, groups).sequences)
    loop.sync(run)
    return groups, metrics


def _of_size(run: "Run", prompts: int) -> "Run":
    """Return the same run with this many prompts per step."""
    from megatron_ibpo.run.rollouts import LiveRollouts

    config = replace(run.config, rollout=replace(run.config.rollout, rollout_batch_size=prompts))
    assert isinstance(run.rollouts, LiveRollouts)  # nothing is replayed
    return replace(run, config=config, rollouts=replace(run.rollouts, config=config, memory=None))
