"""Compare methods under the same budget: several seeds each, all costs counted, intervals and tests.

    bash tools/ibpo.sh compare examples/studies/mini.yaml --save runs/mini
    bash tools/ibpo.sh compare examples/studies/main_table.yaml --add my=my.yaml --only my --save runs/my
    bash tools/ibpo.sh compare a.yaml b.yaml --baseline a --budget 60 --seeds 3 --save runs/ab

Give one study (a file with `methods`), or recipes, one per method; or a results.json, whose page is
rewritten. Finished runs are not repeated: the same command continues where it was stopped. The page, the
table, the curves and all numbers are written to --save.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron_ibpo.basics.entry_point import DONE, FAILED, guarded, parsed
from megatron_ibpo.commands import train
from megatron_ibpo.config import ConfigError
from megatron_ibpo.config.run import BudgetUnit
from megatron_ibpo.report.display import open_console
from megatron_ibpo.study.claims import compare_all
from megatron_ibpo.study.findings import read_findings
from megatron_ibpo.study.page import write_page
from megatron_ibpo.study.study_files import read_study
from megatron_ibpo.study.study_run import conduct

Names = Annotated[list[str], tyro.conf.UseAppendAction]


@dataclass
class Arguments:
    recipes: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE …")]
    """A study, recipes, or a results.json."""
    save: Path
    """Directory for the runs and the results."""
    add: Names = field(default_factory=list)
    """A further method, NAME=WHAT: a recipe, or an import path module:NAME of settings, an operator or an
    estimator. May be repeated."""
    only: Names = field(default_factory=list)
    """A method to compare with the baseline; may be repeated. Default: all."""
    task: Names = field(default_factory=list)
    """A task of the study to run; may be repeated. Default: all."""
    baseline: str | None = None
    """Method that the others are compared with."""
    budget: float | None = None
    """Budget of each run."""
    budget_unit: BudgetUnit | None = None
    seeds: int | None = None
    """Number of seeds, from 0 on."""
    threshold: float | None = None
    """Training reward whose cost is compared."""
    processes: int | None = None
    """Trainer processes per run."""
    run_timeout: float | None = None
    """Seconds after which a run is ended."""
    runs_at_most: int | None = None
    """Stop after this many runs; the same command continues later. 0 shows what the study would cost."""
    parallel: int = 1
    """Runs at a time."""


def compare_methods(arguments: Arguments) -> int:
    names = ("baseline", "budget", "budget_unit", "seeds", "threshold", "processes", "run_timeout")
    overrides: dict[str, Any] = {n: v for n in names if (v := getattr(arguments, n)) is not None}
    if not arguments.recipes:
        raise ConfigError("name a study, such as examples/studies/mini.yaml, recipes, or a results.json")
    if arguments.parallel < 1:
        raise ConfigError("--parallel must be at least 1")
    if [path.name.endswith((".json", ".json.gz")) for path in arguments.recipes] == [True]:
        findings = read_findings(arguments.recipes[0])
        print(*write_page(findings, compare_all(findings), arguments.save), sep="\n")
        return DONE
    study = read_study(
        arguments.recipes,
        overrides,
        add=dict(map(_named, arguments.add)),
        only=arguments.only,
        tasks=arguments.task,
    )
    complete = conduct(
        study,
        arguments.save,
        train.main,
        open_console(),
        parallel=arguments.parallel,
        runs_at_most=arguments.runs_at_most,
    )
    return DONE if complete or arguments.runs_at_most == 0 else FAILED


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"--add {text}: must read NAME=RECIPE or NAME=module:NAME")
    return name, value


def main(argv: Sequence[str] | None = None) -> int:
    """Compare methods. Return 1 if a run is missing. SIGTERM stops the runs as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parse = partial(parsed, Arguments, __doc__, argv, program="ibpo compare")
    return guarded(lambda: compare_methods(parse()), stopped="stopped; the same command resumes from here")


if __name__ == "__main__":
    sys.exit(main())
