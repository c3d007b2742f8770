"""The loop: sample, credit, update, sync, report, save.

This process is the driver. It starts trainers, engines and verifiers, holds prompts, samples and credit, and
has no model itself.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_ibpo.checks import check_run, check_settings
from megatron_ibpo.config import Config, ConfigError, parse_config
from megatron_ibpo.versions import missing

DONE, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. Returns the exit status: 0 done, 2 bad input, 130 interrupted; raises when
    training fails."""
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
    # imported late, so that wrong flags are answered at once
    from megatron_ibpo.interrupts import StopRequest
    from megatron_ibpo.startup import START_ERRORS, open_run

    stop = StopRequest()
    with ExitStack() as stack:
        try:
            run = stack.enter_context(open_run(config))
        except START_ERRORS as error:
            return refuse(error)
        run.evaluate_if_due()
        while not run.done():
            groups = run.sample()
            credit = run.credit(groups)
            metrics = run.measure_gradient_if_due(groups, credit.sequences)
            metrics |= run.update(credit.sequences)
            metrics |= run.sync()
            run.report(groups, credit, metrics)
            stopping = stop.requested
            run.save_if_due(stopping=stopping)
            if stopping:
                run.finish("interrupted")
                return INTERRUPTED
            run.evaluate_if_due()
        run.finish("finished")
    return DONE


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


def refuse(error: BaseException) -> int:
    """Say what is wrong with the input; returns the exit status."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
