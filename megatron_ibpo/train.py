"""The loop: sample, credit, update, sync, report, save.

This process is the driver. It starts trainers, engines and verifiers, holds prompts, samples and credit, and
has no model itself.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING

from megatron_ibpo.checks import check_run, check_settings
from megatron_ibpo.config import Config, ConfigError, parse_config
from megatron_ibpo.interrupts import StopRequest
from megatron_ibpo.versions import missing

if TYPE_CHECKING:
    from megatron_ibpo.loop import Run

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
STARTS = 3
"""Of a run that has lost a node: another one may be lost while it starts again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. Returns the exit status: 0 done, 1 stopped for want of disk space, 2 bad input,
    130 interrupted; raises when training fails."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        check_settings(config)
    except ConfigError as error:
        return refuse(error)
    return _plan(config) if config.run.dry_run else train(config)


def train(config: Config) -> int:
    """The whole run."""
    if lacks := lacking():
        return refuse(lacks)
    stop = StopRequest(config.run.run_dir / "hangup.log")
    # imported late, so that wrong flags are answered at once
    from megatron_ibpo.report.disk import DiskFullError

    try:
        return _train(config, stop)
    except DiskFullError as error:
        return refuse(error, FAILED)
    except KeyboardInterrupt:
        print("stopped at once", file=sys.stderr, flush=True)
        return INTERRUPTED


def _train(config: Config, stop: StopRequest) -> int:
    from megatron_ibpo.startup import NODE_ERRORS, START_ERRORS, ProcessDiedError, going_on

    starts_left, node_wait = 1, 0.0
    while True:
        with ExitStack() as stack:
            try:
                run = stop.cuts_short(partial(stack.enter_context, opened(config, node_wait)))
            except START_ERRORS as error:
                starts_left -= 1
                if starts_left == 0 or not isinstance(error, ProcessDiedError):
                    return refuse(error)
                print(f"{error}; starting once more", file=sys.stderr, flush=True)
                continue
            if run is None:
                return INTERRUPTED
            try:
                return _steps(run, stop)
            except NODE_ERRORS as lost:
                config = going_on(run)
                run.reporter.note(f"{lost}; the run goes on from its journal when there is room for it")
        starts_left, node_wait = STARTS, config.cluster.node_wait


def opened(config: Config, node_wait: float = 0.0) -> AbstractContextManager["Run"]:
    """The run in one process where --rollout-backend asks for that, which takes torch in this one."""
    if config.rollout.rollout_backend == "lean":
        from megatron_ibpo.lean_run import open_lean_run

        return open_lean_run(config)
    from megatron_ibpo.startup import open_run

    return open_run(config, node_wait)


def _steps(run: "Run", stop: StopRequest) -> int:
    stop.cuts_short(run.evaluate_if_due)
    stop.cuts_short(run.measure_corrections_if_due)
    while not (run.done() or stop.requested):
        groups = run.sample()
        credit = run.credit(groups)
        metrics = run.measure_gradient_if_due(groups, credit.sequences)
        metrics |= run.update(credit.sequences)
        metrics |= run.sync()
        run.report(groups, credit, metrics)
        run.save_if_due()
        stop.cuts_short(run.evaluate_if_due)
    run.finish("interrupted" if stop.requested else "finished")
    return INTERRUPTED if stop.requested else DONE


def _plan(config: Config) -> int:
    """The plan of a run, printed."""
    from megatron_ibpo.plan.run_plan import plan_run

    try:
        check_run(config)
    except ConfigError as error:
        return refuse(error)
    return plan_run(config)


def lacking() -> ImportError | None:
    """What to say where packages that a run needs are not installed."""
    if not (names := missing()):
        return None
    return ImportError(
        f"not installed: {', '.join(names)}; `bash tools/bootstrap.sh` installs what a run needs"
    )


def refuse(error: BaseException, status: int | None = None) -> int:
    """Say what is wrong, with the input if nothing else; returns the exit status."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return getattr(error, "exit_status", BAD_INPUT) if status is None else status


if __name__ == "__main__":
    sys.exit(main())
