"""Check whether a run computes what it claims, on its own model, data, reward and settings.

    bash tools/ibpo.sh verify --config RECIPE [flags of the run] [--full] [--only split,engine] [--save FILE]

Without --full a cut-down model of the same family stands for the run's, unless that is tiny already. The exit
status is 1 if a check finds something wrong. docs/verify.md says what each line means.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ibpo.basics.entry_point import command
from megatron_ibpo.config import ConfigError, nearest
from megatron_ibpo.data.hub import with_local_copies
from megatron_ibpo.report.run_dir import write_whole
from megatron_ibpo.run.settings import check_installed, check_settings, parse_config


def split_flags(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (this command's own flags, those of the run)."""
    parser = argparse.ArgumentParser(
        prog="ibpo verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="the run's own model, whatever its size")
    parser.add_argument("--only", default=None, metavar="CHECK,CHECK", help="these checks alone")
    parser.add_argument("--save", type=Path, default=None, metavar="FILE", help="write the rows as JSON")
    return parser.parse_known_args(words)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Check one run. Return 1 if something is wrong."""
    arguments, of_run = split_flags(sys.argv[1:] if argv is None else argv)
    from megatron_ibpo.verify.rows import CHECKS, as_json, table

    only = CHECKS if arguments.only is None else tuple(arguments.only.split(","))
    for name in only:
        if name not in CHECKS:
            raise ConfigError(
                f"--only {name}: no such check; there are {', '.join(CHECKS)}{nearest(name, CHECKS)}"
            )
    config = parse_config(of_run)
    check_settings(config)
    check_installed()
    from megatron_ibpo.verify.checks import run_checks  # imports torch

    rows, about = run_checks(with_local_copies(config), full=arguments.full, only=only)
    print(table(rows))
    if arguments.save is not None:
        write_whole(arguments.save, as_json(rows, about))
        print(arguments.save)
    return int(any(row.verdict == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
