"""Check which of reasoning_gym's tasks can be graded with their default parameters, as a run checks its first
prompts.

    python tools/check_generated_tasks.py --save tools/results/generated_tasks.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import bench
import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.rewards.reasoning_gym import UNGRADABLE, label_problem


@dataclass
class Arguments(bench.Saving):
    items: int = 20
    """Items per task."""


@dataclass
class Row:
    task: str
    verdict: str
    """Either graded or refused."""
    reason: str | None


def items_of(task: str, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, metadata) of some items, as in a run."""
    dataset = reasoning_gym.create_dataset(task, seed=1, size=count)
    for number in range(count):
        item = dataset[number]
        yield str(item["answer"]), {**item["metadata"], "question": item["question"], "parameters": {}}


def verdict(task: str, count: int) -> Row:
    if task in UNGRADABLE:
        return Row(task, "refused", UNGRADABLE[task])
    problems = (label_problem(label, metadata) for label, metadata in items_of(task, count))
    reason = next((problem for problem in problems if problem is not None), None)
    return Row(task, "graded" if reason is None else "refused", reason)


def main(arguments: Arguments) -> None:
    rows = [verdict(task, arguments.items) for task in sorted(DATASETS)]
    for row in rows:
        if row.reason is not None:
            print(f"{row.task}: {row.reason}")
    print(f"{sum(row.reason is None for row in rows)} of {len(rows)} tasks can be graded")
    content = {"items": arguments.items, "rows": [asdict(row) for row in rows]}
    bench.save(arguments.save, content, "reasoning-gym")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
