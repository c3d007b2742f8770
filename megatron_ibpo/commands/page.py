"""Read a run: live in a browser, as one HTML file, or its samples as text.

    bash tools/ibpo.sh serve runs/a                          follows the run while it trains
    bash tools/ibpo.sh serve runs/a runs/b                   both, and their differences
    bash tools/ibpo.sh page runs/a                           writes runs/a/page.html, which needs no server
    bash tools/ibpo.sh samples runs/a                        the first group of the last recorded step
    bash tools/ibpo.sh samples runs/a --step 8 --group 3     another one

Samples are those of --keep-samples, or of every step with --save-debug-rollout-data. Results of `evaluate`
can be read as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.basics.text import legible

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


@dataclass
class Samples:
    """Print what the policy wrote in one group of samples, and how every advantage came about."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    step: int | None = None
    """Recorded step; None: the last one."""
    group: int = 1
    """Group of the step, counted from 1."""


Arguments = (
    Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Page, tyro.conf.subcommand("page")]
    | Annotated[Samples, tyro.conf.subcommand("samples")]
)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Show runs as the flags say. Return the exit status."""
    arguments: Serve | Page | Samples = parsed(Arguments, __doc__, argv, program="ibpo")
    if isinstance(arguments, Samples):
        print("\n".join(_sample_lines(arguments)))
        return
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


def _sample_lines(arguments: Samples) -> Iterator[str]:
    from megatron_ibpo.credit.explanation import Line
    from megatron_ibpo.report.page.directories import NotThere, RunSource

    source = RunSource(arguments.run)
    steps = source.recorded()
    step = arguments.step if arguments.step is not None else max(steps, default=None)
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{arguments.run}: step {step} is not recorded; recorded steps: {listed}")
    try:
        content = source.group(step, arguments.group - 1)
    except NotThere as error:
        raise ValueError(f"{arguments.run}: no group {arguments.group}: {error}") from error
    yield f"step {step}, group {arguments.group}, label {legible(content['label'])}"
    yield from (legible(text) for _, text in content["prompt"] if text)
    for kind in ("response", "correction"):
        for number, sample in enumerate(content[f"{kind}s"], start=1):
            tokens = sample["tokens"] if kind == "response" else sample["response"]["tokens"]
            text = "".join(content["vocabulary"][token][0] for token in tokens)
            yield f"\n{kind} {number}: {legible(text)}"
            yield from (f"  {legible(str(Line(*line)))}" for line in sample["lines"])


if __name__ == "__main__":
    sys.exit(main())
