"""Programs per second that code rewards grade, sandbox included, compared with bwrap and Python alone.

    python tools/bench_code_rewards.py --save tools/results/bench_code_rewards.json

Every program runs in its own sandbox. Rounds of all kinds take turns, so that the machine's other load
affects all of them; each round is stored with the load average.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import bench

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards import open_verifier
from megatron_ibpo.rewards.sandbox import bubblewrap


@dataclass
class Arguments(bench.Saving):
    workers: int = 4
    """Verifier processes, and commands at one time. It exceeds the processors, since building a sandbox
    waits."""
    programs: int = 100
    """Programs per round."""
    rounds: int = 5


@dataclass
class Round:
    kind: str
    per_second: float
    cpu_ms: float
    """Processor milliseconds per program, with all its processes: more meaningful if others use the machine
    too."""
    load: float
    """Load average of the last minute."""


LABELS = {
    "stdin": {"inputs": ["1 2"], "outputs": ["3"]},
    "function, 5 tests": {"inputs": ["1\n2"] * 5, "outputs": ["3"] * 5, "fn_name": "add"},
    "stdin, 5 tests": {"inputs": ["1 2"] * 5, "outputs": ["3"] * 5},
    "asserts": {"test": "assert add(1, 2) == 3", "entry_point": None},
}
PROGRAM = """
def add(a, b):
    return a + b

if __name__ == "__main__":
    print(add(*map(int, input().split())))
"""


def commands(command: list[str], arguments: Arguments) -> Callable[[], None]:
    """Return a function that runs a command once per program."""

    def run() -> None:
        with ThreadPoolExecutor(arguments.workers) as threads:
            list(
                threads.map(
                    lambda _: subprocess.run(command, check=True, env={}, stdin=subprocess.DEVNULL),
                    range(arguments.programs),
                )
            )

    return run


def measured(kind: str, run: Callable[[], None], programs: int) -> Round:
    cpu, start = bench.cpu_seconds(), time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return Round(kind, programs / seconds, (bench.cpu_seconds() - cpu) / programs * 1e3, os.getloadavg()[0])


def main(arguments: Arguments) -> None:
    python = bubblewrap.python()
    kinds = {
        "floor: bwrap with all namespaces, true": commands(
            [bubblewrap.bubblewrap(), "--unshare-all", "--ro-bind", "/", "/", "/bin/true"], arguments
        ),
        "floor: python -I -S -c pass": commands([python, "-I", "-S", "-c", "pass"], arguments),
    }
    data = DataConfig(
        rm_type="code", reward_workers=arguments.workers, reward_timeout=120.0, code_timeout=60.0
    )
    with open_verifier(data) as verifier:
        for kind, label in LABELS.items():
            prompt = Prompt(
                0, token_ids([1]), head_length=1, label=json.dumps(label), task="", text="", metadata={}
            )
            pairs = [(prompt, PROGRAM)] * arguments.programs

            def grade(pairs: list[tuple[Prompt, str]] = pairs) -> None:
                assert {score.reward for score in verifier.score(pairs)} == {1.0}

            kinds[kind] = grade
        verifier.score(pairs)
        rounds = [
            measured(kind, run, arguments.programs)
            for _ in range(arguments.rounds)
            for kind, run in kinds.items()
        ]
    rows = []
    for kind in kinds:
        own = [each for each in rounds if each.kind == kind]
        rows.append(
            {
                "kind": kind,
                "per_second_median": round(statistics.median(each.per_second for each in own), 1),
                "per_second_best": round(max(each.per_second for each in own), 1),
                "cpu_ms_median": round(statistics.median(each.cpu_ms for each in own), 2),
                "cpu_ms_least": round(min(each.cpu_ms for each in own), 2),
            }
        )
        print(rows[-1])
    version = [bubblewrap.bubblewrap(), "--version"]
    content = {
        "bubblewrap": subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip(),
        "workers": arguments.workers,
        "programs": arguments.programs,
        "rows": rows,
        "rounds": [asdict(each) for each in rounds],
    }
    bench.save(arguments.save, content)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
