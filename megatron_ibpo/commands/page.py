"""Read a run: live in a browser, or as one HTML file.

    bash tools/ibpo.sh serve runs/a                 follows the run while it trains
    bash tools/ibpo.sh serve runs/a runs/b          both, and their differences
    bash tools/ibpo.sh page runs/a                  writes runs/a/page.html, which needs no server

Samples are those of --keep-samples, or of every step with --save-debug-rollout-data. Results of `evaluate`
can be read as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron_ibpo.basics.entry_point import command, parsed

Runs = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIRECTORY …")]


@dataclass
class Serve:
    """Follow runs in a browser on this machine."""

    runs: Runs
    """Directories of runs or evaluations."""
    port: int = 8800
    """Port on 127.0.0.1; if it is in use, a free one is taken."""


@dataclass
class Page:
    """Write runs as one HTML file."""

    runs: Runs
    """Directories of runs or evaluations."""
    save: Path | None = None
    """File to write; None: page.html in the first directory."""
    steps: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="STEP …")] = None
    """Recorded steps to show; None: as many of all as a browser opens at once."""


Arguments = Annotated[Serve, tyro.conf.subcommand("serve")] | Annotated[Page, tyro.conf.subcommand("page")]


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Show runs as the flags say. Return the exit status."""
    arguments: Serve | Page = parsed(Arguments, __doc__, argv, program="ibpo")
    if not arguments.runs:
        raise ValueError("which run? Name the directory of one, as in: ibpo serve runs/a")
    if isinstance(arguments, Serve):
        _serve(arguments)
    else:
        _write(arguments)


def _serve(arguments: Serve) -> None:
    # imported late, so that wrong flags are answered at once
    from megatron_ibpo.report.page.directories import open_source
    from megatron_ibpo.report.page.server import serve

    sources = [open_source(directory) for directory in arguments.runs]
    for source in sources:
        source.overview()  # so that unreadable directories are reported now
    serve(sources, arguments.port, say=lambda line: print(line, flush=True))


def _write(arguments: Page) -> None:
    from megatron_ibpo.report.page.html import build_page

    path = arguments.save or arguments.runs[0] / "page.html"
    text = build_page(arguments.runs, steps=arguments.steps)
    path.write_text(text, encoding="utf-8")
    print(f"{path} ({len(text.encode()) / 2**20:.1f} MiB)")


if __name__ == "__main__":
    sys.exit(main())
