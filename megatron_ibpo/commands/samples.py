"""Print samples of a run as text: what the policy wrote, and how every advantage came about.

    bash tools/ibpo.sh samples runs/a                        the first group of the last recorded step
    bash tools/ibpo.sh samples runs/a --step 8 --group 3     another one

Steps are those of --keep-samples, or all with --save-debug-rollout-data. `serve` shows them in a browser.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.basics.text import legible
from megatron_ibpo.credit.explanation import Line


@dataclass
class Arguments:
    """Print samples of a run."""

    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    step: int | None = None
    """Recorded step; None: the last one."""
    group: int = 1
    """Group of the step, counted from 1."""


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the group that the flags name. Return the exit status."""
    arguments: Arguments = parsed(Arguments, __doc__, argv, program="ibpo samples")
    print("\n".join(_lines(arguments)))


def _lines(arguments: Arguments) -> Iterator[str]:
    # imported late, so that wrong flags are reported at once
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
