"""Check the mathematical verifier on labelled data of others: Math-Verify's own tests, and GSM8K's published
model solutions.

    python tools/check_math_grading.py --math-verify-tests Math-Verify/tests \
        --gsm8k grade_school_math/data/example_model_solutions.jsonl

Neither is part of this repository: clone https://github.com/huggingface/Math-Verify and
https://github.com/openai/grade-school-math. Differences are listed case by case; docs/rewards.md has the
reasons.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bench

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.rewards import LabelError, ResponseError
from megatron_ibpo.rewards.math import is_right

_CALCULATION = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator marks, which are not part of a solution."""
_GSM8K_ANSWER = "A:"
_COMPARISON = re.compile(r"gold, ?pred, ?(expected|result)\b")
"""Parameters of Math-Verify's comparison tests; settings of one test may follow."""


@dataclass
class Arguments(bench.Saving):
    math_verify_tests: Path | None = None
    """Folder `tests` of Math-Verify."""
    gsm8k: Path | None = None
    """example_model_solutions.jsonl of grade-school-math."""


@dataclass(frozen=True)
class Case:
    where: str
    label: str
    response: str
    is_right: bool
    """The source's label."""


def math_verify_cases(tests: Path) -> Iterator[Case]:
    """Yield the tests that compare a gold answer with a response, with the usual settings."""
    sys.path.insert(0, str(tests.parent))
    for path in sorted(tests.glob("test_*.py")):
        module = importlib.import_module(f"{tests.name}.{path.stem}")
        for name, test in vars(module).items():
            for mark in getattr(test, "pytestmark", []):
                names = mark.args[0] if mark.name == "parametrize" else ""
                if _COMPARISON.match(names):
                    for gold, pred, expected, *_ in mark.args[1]:
                        yield Case(f"{path.stem}::{name}", gold, pred, bool(expected))


def gsm8k_cases(path: Path) -> Iterator[Case]:
    """Yield every model's solution to every problem, with GSM8K's own verdict."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        label = row["ground_truth"].rpartition(_GSM8K_ANSWER)[2].strip()
        for name, said in row.items():
            if isinstance(said, dict) and "is_correct" in said:
                solution = _CALCULATION.sub("", said["solution"])
                yield Case(f"line {number}, {name}", label, solution, bool(said["is_correct"]))


def verdict(case: Case) -> bool | str:
    """Return this project's verdict, or why there is none."""
    try:
        return is_right(case.response, case.label)
    except ResponseError:  # the response's own fault, and so wrong
        return False
    except LabelError as error:
        return f"{type(error).__name__}: {error}"


def compared(what: str, cases: Iterator[Case]) -> dict[str, object]:
    """Return the number of agreements, and the disagreements."""
    judged = [(case, verdict(case)) for case in cases]
    differ = [
        {
            "where": case.where,
            "label": case.label[:200],
            "response": case.response[-200:],
            "theirs": case.is_right,
            "ours": ours,
        }
        for case, ours in judged
        if ours is not case.is_right
    ]
    print(f"{what}: {len(judged) - len(differ)} of {len(judged)} agree")
    for case in differ:
        print(" ", json.dumps(case, ensure_ascii=False))
    return {"source": what, "cases": len(judged), "agree": len(judged) - len(differ), "differ": differ}


def main(arguments: Arguments) -> None:
    found = []
    if arguments.math_verify_tests is not None:
        cases = math_verify_cases(arguments.math_verify_tests.resolve())
        found.append(compared("Math-Verify's tests", cases))
    if arguments.gsm8k is not None:
        found.append(compared("GSM8K's model solutions", gsm8k_cases(arguments.gsm8k)))
    # the text of the differing cases is the sources' own, and stays out
    rows = [{name: value for name, value in row.items() if name != "differ"} for row in found]
    bench.save(arguments.save, {"rows": rows}, "math-verify")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
