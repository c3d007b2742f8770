"""Mathematical answers checked per second: by the verifier in its worker processes, by its function alone,
and by math-verify alone, all on the same answers.

    python tools/bench_math_rewards.py --save tools/results/bench_math_rewards.json

The answers are typical ones: integers, decimals, fractions, amounts, powers and a few formulas, half of them
right, eight responses per question. A second set has wrong formulas, as harder problems do: text alone cannot
decide them, and math-verify searches long for a way to make them equal.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import bench
import math_verify

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import ResponseError, Verifier, open_verifier
from megatron_ibpo.rewards.math import is_right

WORKERS = 2
RESPONSES = 8
"""Responses per question."""
SOLUTION = "We write down what is given, and compute step by step: 3 + 4 = 7, then twice that. " * 12


@dataclass
class Arguments(bench.Saving):
    answers: int = 4000
    """Answers that the verifier and its function check per round."""
    of_math_verify: int = 400
    """Answers that math-verify alone checks per round."""
    rounds: int = 3


@dataclass
class Row:
    what: str
    answers: int
    per_second: float
    """Median of the rounds."""
    slowest_round: float
    """Answers per second in the slowest round."""
    per_cpu_second: float
    """Median per second of processor time, over all processors and including the workers. It is more reliable
    than the clock on a machine with other work."""
    load: float
    """Mean number of processes that wanted a processor over the last minute."""
    right: int
    """Right answers in the first round."""


def typical(draw: random.Random) -> tuple[str, str]:
    """Return (label, the same answer as a model may write it)."""
    n, d = draw.randint(2, 99_999), draw.randint(2, 99)
    return draw.choice(
        [
            (str(n), str(n)),
            (str(n), f"{n:,}"),
            (str(n), f"\\${n}"),
            (str(n), f"{n}\\text{{ cm}}"),
            (str(-n), f"-{n}"),
            (f"{n}.5", f"{n}.50"),
            (f"\\frac{{{n}}}{{{d}}}", f"\\dfrac{{{n}}}{{{d}}}"),
            (f"{n}/{d}", f"\\frac{{{n}}}{{{d}}}"),
            (f"{n}\\%", f"{n}%"),
            (f"{d}e-3", f"{d} \\times 10^{{-3}}"),
            (f"x^2+{n}", f"x^2 + {n}"),
            (f"({n}, {d})", f"({n},{d})"),
        ]
    )


def answers(count: int, seed: int) -> list[tuple[str, str]]:
    """Return this many (label, response), every second one wrong."""
    draw = random.Random(seed)
    made: list[tuple[str, str]] = []
    while len(made) < count:
        label, answer = typical(draw)
        for number in range(RESPONSES):
            wrong = f"{answer}{number}" if answer[-1].isdigit() else str(draw.randint(100_000, 999_999))
            made.append((label, f"{SOLUTION}\nThe answer is $\\boxed{{{wrong if number % 2 else answer}}}$."))
    return made[:count]


def wrong_formulas(count: int, seed: int) -> list[tuple[str, str]]:
    """Return this many (label, response), each wrong and no two alike."""
    draw = random.Random(seed)

    def formula() -> str:
        a, b, c = (draw.randint(2, 999) for _ in range(3))
        return draw.choice(
            [
                f"{a}\\sqrt{{{b}}}",
                f"\\frac{{{a}\\pi}}{{{b}}}",
                f"x^2+{a}x+{b}",
                f"\\frac{{{a}+\\sqrt{{{b}}}}}{{{c}}}",
                f"{a}+{b}i",
                f"{a}^{{{b % 20}}}",
                f"y={a}x+{b}",
                f"[{a},\\infty)",
                f"(-\\infty,{a}]\\cup[{a + b},\\infty)",
                f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & 1 \\end{{pmatrix}}",
            ]
        )

    return [(formula(), f"{SOLUTION}\nThe answer is $\\boxed{{{formula()}}}$.") for _ in range(count)]


def by_math_verify(pairs: list[tuple[str, str]]) -> int:
    return sum(
        math_verify.verify(math_verify.parse(f"${label}$"), math_verify.parse(response))
        for label, response in pairs
    )


def by_function(pairs: list[tuple[str, str]]) -> int:
    return sum(map(judged_right, pairs))


def judged_right(pair: tuple[str, str]) -> bool:
    label, response = pair
    try:
        return is_right(response, label)
    except ResponseError:
        return False


def by_verifier(verifier: Verifier) -> Callable[[list[tuple[str, str]]], int]:
    def check(pairs: list[tuple[str, str]]) -> int:
        asked = [
            (Prompt(0, token_ids([]), 0, label, "", "What is it?"), response) for label, response in pairs
        ]
        return sum(score.correct for score in verifier.score(asked))

    return check


def measure(
    what: str,
    check: Callable[[list[tuple[str, str]]], int],
    count: int,
    rounds: int,
    make: Callable[[int, int], list[tuple[str, str]]] = answers,
) -> Row:
    speeds, of_cpu, right = [], [], []
    check(make(64, -1))  # compiles regular expressions and warms up libraries
    for seed in range(rounds):
        pairs = make(count, seed)
        start, cpu = time.perf_counter(), bench.cpu_seconds()
        right.append(check(pairs))
        speeds.append(count / (time.perf_counter() - start))
        of_cpu.append(count / (bench.cpu_seconds() - cpu))
    median = statistics.median
    return Row(what, count, median(speeds), min(speeds), median(of_cpu), os.getloadavg()[0], right[0])


def rows(arguments: Arguments) -> Iterator[Row]:
    with open_verifier(DataConfig(rm_type="math", reward_workers=WORKERS)) as verifier:
        name = f"the verifier, {WORKERS} workers"
        yield measure(name, by_verifier(verifier), arguments.answers, arguments.rounds)
    yield measure("its function, one process", by_function, arguments.answers, arguments.rounds)
    yield measure("math-verify, one process", by_math_verify, arguments.of_math_verify, arguments.rounds)
    for what, check in (("its function", by_function), ("math-verify", by_math_verify)):
        name = f"{what}, one process, wrong formulas"
        yield measure(name, check, arguments.of_math_verify, arguments.rounds, wrong_formulas)


def main(arguments: Arguments) -> None:
    found = []
    for row in rows(arguments):
        print(
            f"{row.what}: {row.per_second:,.0f} a second, {row.per_cpu_second:,.0f} a second of processor "
            f"time, {row.right} of {row.answers} right (load {row.load:.0f})"
        )
        found.append(asdict(row))
    bench.save(arguments.save, {"rows": found}, "math-verify")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
