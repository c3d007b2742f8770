"""The loop: sample, score, correct and credit, update, sync, report, save.

Every rank runs this same program under torchrun. What crosses ranks (prompts, responses, scores) is equal
everywhere; rank 0, the driver, alone scores and writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_ibpo.config import Config, ConfigError, parse_config
from megatron_ibpo.quiet import hush_megatron
from megatron_ibpo.versions import missing

__all__ = ["main", "train"]

DONE, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. Returns the exit status: 0 done, 2 bad input, 130 interrupted; raises when
    training fails."""
    try:
        config = parse_config(sys.argv[1:] if argv is None else argv)
        from megatron_ibpo.checks import check_run  # imports torch, which --help does not need

        check_run(config)
    except ConfigError as error:
        return _refuse(error)
    if config.run.dry_run:
        from megatron_ibpo.dry_run.plan import plan_run

        return plan_run(config)
    return train(config)


def train(config: Config) -> int:
    """The whole run, on this rank."""
    if lacks := missing():
        return _refuse(
            ImportError(
                f"not installed: {', '.join(lacks)}; `bash tools/bootstrap.sh` installs what a run needs"
            )
        )
    hush_megatron()
    # imported late, so that wrong flags are answered at once
    from megatron_ibpo.assembly import START_ERRORS, assemble
    from megatron_ibpo.interrupts import StopRequest

    stop = StopRequest()
    with ExitStack() as stack:
        try:
            run = stack.enter_context(assemble(config))
        except START_ERRORS as error:
            return _refuse(error)
        step = run.first_step
        run.evaluate_if_due(step)
        while not run.done(step):
            groups = run.sample(step)
            credit = run.credit(groups, step)
            metrics = run.measure_gradient_if_due(groups, credit.sequences, step)
            metrics |= run.update(credit.sequences)
            step += 1
            metrics |= run.sync(step)
            run.report(step, groups, credit.sequences, credit.metrics | metrics)
            stopping = run.agree_to_stop(stop.requested)
            run.save_if_due(step, stopping=stopping)
            if stopping:
                run.finish("interrupted")
                return INTERRUPTED
            run.evaluate_if_due(step)
        run.finish("finished")
    return DONE


def _refuse(error: BaseException) -> int:
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
