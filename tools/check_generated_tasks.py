"""Check which of reasoning_gym's tasks can be graded with their default parameters, as a run checks its first
prompts; attack their scorers with answers that are code; and time them in their sandbox and without one.

    python tools/check_generated_tasks.py --save tools/results/generated_tasks.json
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench
import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import Verifier, open_verifier
from megatron_ibpo.rewards.reasoning_gym import UNGRADABLE, label_problem

TIMED = ("chain_sum", "countdown")
"""The default run's task, and one whose answers are evaluated."""
ATTACKS = (
    "__import__('os').system('touch {path}')",
    "open({path!r}, 'w').close()",
    "[x for x in ().__class__.__base__.__subclasses__()] and open({path!r}, 'w')",
    "[setattr(c, 'score_answer', lambda *_: 1.0) for c in "
    "__import__('reasoning_gym').factory.ProceduralDataset.__subclasses__()]",
    "[0 for __builtins__['bool'] in [repr]]",
    "(_ for _ in ()).throw(KeyboardInterrupt)",
    "1/0",
)
"""Answers that write a file, patch the scorers, and raise."""


@dataclass
class Arguments(bench.Saving):
    items: int = 20
    """Items per task."""
    answers: int = 256
    """Answers per round of a timed task."""
    rounds: int = 7


@dataclass
class Row:
    task: str
    verdict: str
    """Either graded or refused."""
    reason: str | None


def items_of(task: str, count: int) -> Iterator[Prompt]:
    """Yield some items as prompts of a run."""
    dataset = reasoning_gym.create_dataset(task, seed=1, size=count)
    for number in range(count):
        item = dataset[number]
        metadata = {**item["metadata"], "question": item["question"], "parameters": {}}
        yield Prompt(number, token_ids([]), 0, str(item["answer"]), task, item["question"], metadata)


def verdict(task: str, count: int) -> Row:
    if task in UNGRADABLE:
        return Row(task, "refused", UNGRADABLE[task])
    problems = (label_problem(prompt.label, prompt.metadata) for prompt in items_of(task, count))
    reason = next((problem for problem in problems if problem is not None), None)
    return Row(task, "graded" if reason is None else "refused", reason)


def attacked(verifier: Verifier, tasks: list[str]) -> dict[str, int]:
    """Return what became of all attacks on these tasks."""
    changed = rewarded = files = 0
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "made")
        for task in tasks:
            (prompt,) = items_of(task, 1)
            for attack in ATTACKS:
                attempts = [attack.format(path=path), prompt.label, "I do not know"]
                scores = verifier.score([(prompt, f"<answer>{answer}</answer>") for answer in attempts])
                rewarded += scores[0].reward != 0
                changed += [score.reward for score in scores[1:]] != [1.0, 0.0]
                files += len(os.listdir(directory))
    attacks = len(tasks) * len(ATTACKS)
    return {
        "tasks": len(tasks),
        "attacks": attacks,
        "files_made": files,
        "attacks_with_a_reward": rewarded,
        "later_answers_changed": changed,
        "deaths_of_workers": verifier._pool.deaths,
    }


def timed(arguments: Arguments) -> list[dict[str, Any]]:
    """Return the time per answer of the timed tasks, in the sandbox and, where that runs, without one."""
    places: dict[str, dict[str, list[float]]] = {task: {} for task in TIMED}
    with ExitStack() as stack:
        verifiers = {"sandbox": stack.enter_context(open_verifier(DataConfig()))}
        broken = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bwrap"
        broken.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        broken.chmod(0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{broken.parent}:{path}"
        verifiers["no sandbox"] = stack.enter_context(open_verifier(DataConfig()))
        os.environ["PATH"] = path
        pairs = {
            task: [(prompt, f"#{prompt.label}") for prompt in items_of(task, arguments.answers)]
            for task in TIMED
        }
        cases = [
            (task, place)
            for task in TIMED
            for place in verifiers
            if (task, place) != (TIMED[1], "no sandbox")
        ]
        for task, place in cases:
            verifiers[place].score(pairs[task][:8])
        for task, place in bench.in_turns(cases, arguments.rounds):
            start = time.perf_counter()
            scores = verifiers[place].score(pairs[task])
            assert {score.reward for score in scores} == {1.0}
            places[task].setdefault(place, []).append((time.perf_counter() - start) / len(scores))
    return [
        {
            "task": task,
            "place": place,
            "us_per_answer_median": round(statistics.median(seconds) * 1e6, 1),
            "us_per_answer_best": round(min(seconds) * 1e6, 1),
        }
        for task, of_place in places.items()
        for place, seconds in of_place.items()
    ]


def main(arguments: Arguments) -> None:
    rows = [verdict(task, arguments.items) for task in sorted(DATASETS)]
    for row in rows:
        if row.reason is not None:
            print(f"{row.task}: {row.reason}")
    graded = [row.task for row in rows if row.reason is None]
    print(f"{len(graded)} of {len(rows)} tasks can be graded")
    with open_verifier(DataConfig()) as verifier:
        attacks = attacked(verifier, graded)
    print(attacks)
    times = timed(arguments)
    for time_row in times:
        print(time_row)
    content = {
        "items": arguments.items,
        "attacks": attacks,
        "answers_per_round": arguments.answers,
        "times": times,
        "rows": [asdict(row) for row in rows],
    }
    bench.save(arguments.save, content, "reasoning-gym", "sympy")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
