"""torchrun with a quiet end: the trainers' own last words and exit status, no launcher's traceback.

python -m megatron_ibpo.launch --nproc-per-node 2 -m megatron_ibpo.train FLAGS…
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run torchrun's command line; return the exit status of the first rank that failed, else 0."""
    # what went wrong is on the ranks' own stderr; the agent would bury it
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
