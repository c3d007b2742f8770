"""Audit a run's credit: does the value of its wrong responses fall where corrections change them?

    bash tools/ibpo.sh audit runs/a

The policy answers held-out prompts as in training, and its wrong responses are corrected. From every step of
a sample of these responses it samples many continuations, to see from where it can still end correct. Prints
what was found; audit.json has all measurements, and audit.png shows them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from megatron_ibpo.basics.entry_point import command, parsed
from megatron_ibpo.report import jsonable
from megatron_ibpo.report.display import open_console
from megatron_ibpo.study.credit_audit import audit, audit_page, plot_audit
from megatron_ibpo.study.instruments import audit_responses


@dataclass
class Arguments:
    run: tyro.conf.Positional[Path]
    """Directory of the run."""
    save: Path | None = None
    """Directory for the results; None: audit/ in the run's directory."""
    policy: Literal["start", "end"] = "end"
    """The policy that the run started from, or the one it ended with."""
    prompts: int = 64
    """Held-out prompts to answer."""
    responses: int = 128
    """Wrong responses to audit."""
    rollouts: int = 16
    """Continuations from each step boundary."""
    min_drop: float = 0.25
    """A response whose value never falls by this much over one step has no step that counts as the error."""
    seed: int = 0


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Audit one run."""
    arguments: Arguments = parsed(Arguments, __doc__, argv, program="ibpo audit")
    if arguments.rollouts < 2 or arguments.rollouts % 2 or min(arguments.prompts, arguments.responses) < 1:
        raise ValueError("--rollouts must be even, --prompts and --responses at least 1")
    save = arguments.save or arguments.run / "audit"
    responses, texts, counts = audit_responses(
        arguments.run,
        save,
        policy=arguments.policy,
        prompts=arguments.prompts,
        responses=arguments.responses,
        rollouts=arguments.rollouts,
        seed=arguments.seed,
    )
    findings = audit(responses, min_drop=arguments.min_drop)
    content = {
        "settings": {name: str(value) for name, value in asdict(arguments).items()},
        "counts": counts,
        "found": findings,
        "responses": [asdict(r) | text for r, text in zip(responses, texts, strict=True)],
    }
    save.mkdir(parents=True, exist_ok=True)
    (save / "audit.json").write_text(json.dumps(_rounded(content), allow_nan=False) + "\n", encoding="utf-8")
    plot_audit(
        responses, findings, save / "audit.png", title=f"{arguments.run.name}, policy: {arguments.policy}"
    )
    console = open_console()
    console.print(audit_page(counts, _rounded(findings)), highlight=False, markup=False)
    print(save / "audit.json", save / "audit.png", sep="\n")


def _rounded(value: Any) -> Any:
    return jsonable(value, shorten=lambda number: round(number, 4))


if __name__ == "__main__":
    sys.exit(main())
