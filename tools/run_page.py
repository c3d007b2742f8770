"""Make the page of a run: one HTML file with curves, groups, and every wrong response with its correction.

    bash tools/ibpo.sh page runs/a            # writes runs/a/page.html; open it in a browser

Responses are shown for runs with --save-debug-rollout-data.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron_ibpo.report.run_page import build_run_page


@dataclass
class Arguments:
    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    save: Path | None = None
    """The file to write; page.html in the run's directory when None."""
    steps: tuple[int, ...] | None = None
    """Show these of the recorded steps only: long responses make a large file."""


def main(arguments: Arguments) -> int:
    path = arguments.save or arguments.run / "page.html"
    try:
        page = build_run_page(arguments.run, steps=arguments.steps)
        path.write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({len(page.encode()) / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
