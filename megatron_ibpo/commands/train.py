"""ibpo train: open a run, train it to its end (`run.steps`), and open it again after the loss of a node."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ibpo.basics.entry_point import DONE, INTERRUPTED, command, guarded
from megatron_ibpo.config import Config
from megatron_ibpo.config.flags import COMMON_FLAGS
from megatron_ibpo.data.hub import prepare_upload, upload_export, with_local_copies
from megatron_ibpo.run.settings import check_installed, check_settings, parse_config
from megatron_ibpo.run.stop_request import StopRequest

if TYPE_CHECKING:
    from megatron_ibpo.run.state import Run

OF_PLAN: dict[str, Any] = {
    "program": "ibpo plan",
    "description": "Print what a run with these flags would need (layout, memory), and start nothing.",
    "common": (
        "dry_run_world_size", "dry_run_gpus_per_node", "dry_run_gpu_memory_gib", "dry_run_hardware",
        "dry_run_response_len", "gpu_hour_price", *(name for name in COMMON_FLAGS if name != "dry_run"),
    ),
}  # fmt: skip
"""Help of `train --dry-run`."""
STARTS = 3
"""Most consecutive starts of a run that has lost a node, since another may be lost meanwhile."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. Return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = parse_config(words, **(OF_PLAN if "--dry-run" in words else {}))
    check_settings(config)
    prepare_upload(config.run)
    config = with_local_copies(config)
    if not config.run.dry_run:
        return train(config)
    from megatron_ibpo.run.preflight import dry_run  # imported late, so that wrong flags are reported at once

    return dry_run(config)


def train(config: Config) -> int:
    """Run the whole training."""
    check_installed()
    stop = StopRequest(config.run.run_dir / "hangup.log")
    logs = config.run.run_dir / "logs"

    def train_and_upload() -> int:
        status = _train(config, stop)
        upload_export(config.run, stopped=stop.requested)
        return status

    return guarded(train_and_upload, logs=logs, stopped="stopped at once")


def _train(config: Config, stop: StopRequest) -> int:
    # imported late, so that wrong flags are reported at once
    from megatron_ibpo.cluster.deaths import ProcessDiedError
    from megatron_ibpo.run.on_cluster import NODE_ERRORS, resume_after_loss
    from megatron_ibpo.run.open import open_run

    starts_left, node_wait, started = 1, 0.0, time.time()
    while True:
        with ExitStack() as stack:
            try:
                run = stop.cuts_short(partial(stack.enter_context, open_run(config, node_wait, started)))
            except ProcessDiedError as error:
                starts_left -= 1
                if starts_left == 0:
                    raise
                print(f"{error}; starting again", file=sys.stderr, flush=True)
                continue
            if run is None:
                return INTERRUPTED
            try:
                return _steps(run, stop)
            except NODE_ERRORS as lost:
                config = resume_after_loss(run, config)
                run.reporter.note(f"{lost}; the run resumes from its journal once the cluster has room")
        starts_left, node_wait = STARTS, config.cluster.node_wait


def _steps(run: "Run", stop: StopRequest) -> int:
    from megatron_ibpo.run import saving  # imported late, as `open_run`
    from megatron_ibpo.run.steps import steps

    for _ in steps(run, stop):
        pass
    saving.finish(run, "interrupted" if stop.requested else "finished")
    return INTERRUPTED if stop.requested else DONE


if __name__ == "__main__":
    sys.exit(main())
