"""Compare methods under the same budget: several seeds each, all costs counted, intervals and tests.

    bash tools/ibpo.sh compare examples/studies/mini.yaml --save runs/mini
    bash tools/ibpo.sh compare a.yaml b.yaml --baseline a --budget 60 --seeds 3 --save runs/ab

Give one study (a file with `methods`), or recipes, each of which is a method. What is finished is not run
again: the same command goes on where it was stopped. The table, the curves and all numbers land in --save.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from megatron_ibpo.config import ConfigError
from megatron_ibpo.report.display import open_console
from megatron_ibpo.study import conduct, read_study

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


@dataclass
class Arguments:
    recipes: tyro.conf.Positional[tuple[Path, ...]]
    """A study, or recipes."""
    save: Path
    """Directory for the runs and what comes of them."""
    baseline: str | None = None
    """Method that the others are compared with."""
    budget: float | None = None
    """Of each run."""
    budget_unit: Literal["accelerator-seconds", "tokens", "flops"] | None = None
    seeds: int | None = None
    """So many, from 0 on."""
    threshold: float | None = None
    """Training reward whose cost is compared."""
    processes: int | None = None
    """Trainer processes of a run."""
    run_timeout: float | None = None
    """Seconds after which a run is ended."""
    runs_at_most: int | None = None
    """Stop after so many runs; the rest is for the next time."""


def main(arguments: Arguments) -> int:
    names = ("baseline", "budget", "budget_unit", "seeds", "threshold", "processes", "run_timeout")
    overrides: dict[str, Any] = {n: v for n in names if (v := getattr(arguments, n)) is not None}
    try:
        study = read_study(arguments.recipes, overrides)
        complete = conduct(study, arguments.save, open_console(), runs_at_most=arguments.runs_at_most)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    return DONE if complete else FAILED


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
