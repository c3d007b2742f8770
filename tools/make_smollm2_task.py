"""Write the task of examples/run_smollm2_ibpo.sh: sums of small numbers, each after two solved ones.

"$(bash tools/bootstrap.sh)" tools/make_smollm2_task.py --save DIR
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from megatron_ibpo.basics.entry_point import run_tool

SYSTEM = "Answer with a number."


@dataclass
class Arguments:
    save: Path
    """Existing directory for train.jsonl and held_out.jsonl, which share no problem."""
    held_out: int = 128
    """Problems to evaluate on; the others are for training."""
    seed: int = 17


def problems() -> list[tuple[str, int]]:
    """Return sums and differences of three one-digit numbers whose result is also one digit."""
    sums = []
    for first, second, third in itertools.product(range(1, 10), repeat=3):
        for first_operator, second_operator in itertools.product("+-", repeat=2):
            text = f"{first} {first_operator} {second} {second_operator} {third}"
            value = (
                first
                + (second if first_operator == "+" else -second)
                + (third if second_operator == "+" else -third)
            )
            if 0 <= value < 10:
                sums.append((text, value))
    return sums


def row(problem: tuple[str, int], examples: list[tuple[str, int]], identity: str) -> dict[str, object]:
    """Return a row. The solved examples are turns of the chat, so that they show the requested form."""
    chat = [{"role": "system", "content": SYSTEM}]
    for text, value in examples:
        chat += [{"role": "user", "content": f"{text} ="}, {"role": "assistant", "content": str(value)}]
    chat.append({"role": "user", "content": f"{problem[0]} ="})
    return {"id": identity, "prompt": chat, "label": str(problem[1])}


def main(arguments: Arguments) -> None:
    draw = random.Random(arguments.seed)
    drawn = problems()
    draw.shuffle(drawn)
    parts = {"held_out": drawn[: arguments.held_out], "train": drawn[arguments.held_out :][:1024]}
    for name, part in parts.items():
        rows = [row(problem, draw.sample(parts["train"], 2), f"{name}-{n}") for n, problem in enumerate(part)]
        (arguments.save / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
