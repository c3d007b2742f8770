"""Write the bundled word problems: examples/math/train.jsonl and held_out.jsonl, which share no problem.

python tools/make_word_problems.py --save examples/math
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ibpo.basics.entry_point import run_tool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tasks"))

from word_problems import WordProblem, word_problems


@dataclass
class Arguments:
    save: Path = Path("examples/math")
    """Directory to write."""
    train: int = 400
    """Problems to train on."""
    held_out: int = 200
    """Problems to evaluate on."""
    seed: int = 14


def draw(count: int, seed: int) -> list[WordProblem]:
    """Return this many problems with different texts."""
    problems: dict[str, WordProblem] = {}
    for problem in word_problems(seed):
        problems.setdefault(problem.text, problem)
        if len(problems) == count:
            break
    return list(problems.values())


def write(path: Path, problems: Sequence[WordProblem]) -> None:
    """Write one row per problem."""
    rows = [
        {
            "id": f"{path.stem}-{number:03d}",
            "prompt": problem.text + "\n",
            "label": problem.label,
            "metadata": {"steps": problem.level},
        }
        for number, problem in enumerate(problems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: Arguments) -> None:
    problems = draw(arguments.train + arguments.held_out, arguments.seed)
    write(arguments.save / "train.jsonl", problems[: arguments.train])
    write(arguments.save / "held_out.jsonl", problems[arguments.train :])


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
