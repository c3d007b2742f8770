"""Verifier of programs: Python code in a response, run against tests in a sandbox. Labels are JSON text:

- `{"inputs": […], "outputs": […]}`: a program that reads stdin and writes stdout, or, with `"fn_name"`, a
  function or a method of `Solution`, as in LiveCodeBench (arXiv 2403.07974), whose testing_util.py says what
  counts as equal and what a program may take as imported;
- `{"test": SOURCE, "entry_point": NAME or null}`: tests in Python. With a name they define
  `check(candidate)`, as HumanEval's do (arXiv 2107.03374); without one they are bare asserts, as MBPP's.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from megatron_ibpo.basics.reward_value import ResponseError
from megatron_ibpo.config import DataConfig
from megatron_ibpo.rewards.executors import Executor, long_integer, open_executor
from megatron_ibpo.rewards.rebinding import with_rebinding
from megatron_ibpo.rewards.response import after_thinking
from megatron_ibpo.rewards.sandbox import Limits, SandboxError
from megatron_ibpo.rewards.sandbox.inside import needed_names

SETTINGS = "code_execution"
"""Key of the metadata under which `score` is told how programs are run."""
CHECK = f"{__name__}:check_execution"
"""Function that a verifier process calls before it scores any response."""
_SHARE_OF_TIMEOUT = 0.8
"""Share of a verifier's time for one response that tests may take; the rest is for starting them on a busy
machine. A slow program is therefore wrong, not a failure of the verifier."""
_FENCE = re.compile(r"(?P<indent>[ \t]*+)(?P<marks>`{3,}+|~{3,}+)[ \t]*+(?P<language>[\w+-]*+)[^`]*+")
"""A line that opens a fenced block: three or more of "`" or "~" with no "`" after them."""
LONGEST_PROGRAM = 200_000
"""Longest program, in characters; a longer one does not count as an answer. Contests accept
64 kB, and the checks that read a program before it runs take 400 bytes of memory per character."""
_MOST_DIGITS = 1_000_000
"""Digits of integers that a program may print; Python's own limit is 4,300."""
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of `ast.parse` for a text that is no Python, or too much of it."""
_PYTHON = {"", "python", "python3", "py"}
_OFFERED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
"""Modules that LiveCodeBench imports for every program, with all their names."""


@dataclass(frozen=True)
class CodeExecution:
    """Settings for running programs."""

    executor: str | None = None
    """URL of a server; None: run programs in a sandbox on this machine."""
    unsafe: bool = False
    seconds: float = 6.0
    """Time limit of one test."""
    memory_mb: int = 1024
    total_seconds: float = 60.0
    """Time limit of all tests of a response."""
    float_tolerance: float = 0.0
    """Difference up to which a real number equals the expected one, where the label names none."""

    @classmethod
    def from_config(cls, data: DataConfig) -> CodeExecution:
        return cls(
            data.code_executor,
            data.unsafe_code_execution,
            data.code_timeout,
            data.code_memory_mb,
            data.reward_timeout * _SHARE_OF_TIMEOUT,
            data.code_float_tolerance,
        )

    def as_metadata(self) -> dict[str, Any]:
        """Return the prompt metadata from which `score` reads these settings."""
        return {SETTINGS: asdict(self)}


@dataclass(frozen=True)
class Problem:
    """Tests of one problem."""

    inputs: tuple[Any, ...] = ()
    """Inputs of the tests: texts for a program, lists of arguments for a function."""
    outputs: tuple[Any, ...] = ()
    function: str | None = None
    test: str | None = None
    entry_point: str | None = None
    float_tolerance: float | None = None
    """The label's own tolerance; None: that of the settings."""


def score(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> dict[str, float]:
    """Return `score`, 1 if the response's program passes all tests, else 0; `tests_passed`, the share of
    tests passed before the first failure, after which no test runs; and `timed_out`, 1 if that test reached a
    time limit. Raises ResponseError if the program is too long, ValueError if the label is not valid, and
    SandboxError if the executor failed."""
    problem = read_problem(label)
    settings = CodeExecution(**metadata.get(SETTINGS, {}))
    program = extract_answer(response)
    if program is None:
        return {"score": 0.0, "tests_passed": 0.0, "timed_out": 0.0}
    if len(program) > LONGEST_PROGRAM:
        raise ResponseError(
            f"a program of {len(program):,} characters; more than {LONGEST_PROGRAM:,} is not run"
        )
    executor = open_executor(settings.executor, unsafe=settings.unsafe)
    passed, total, timed_out = 0, 1 if problem.test is not None else len(problem.inputs), False
    for verdict in _verdicts(executor, program, problem, settings):
        if verdict != "passed":
            timed_out = verdict == "time"
            break
        passed += 1
    return {"score": float(passed == total), "tests_passed": passed / total, "timed_out": float(timed_out)}


def check_execution(prompt: str, response: str, label: str, metadata: dict[str, Any]) -> float:
    """Refuse to start where programs cannot be run as the metadata says; called like `score`. Raises what
    `open_executor` raises, and SandboxError if the server runs no programs."""
    execution = CodeExecution(**metadata[SETTINGS])
    limits = Limits(execution.seconds, execution.memory_mb << 20)
    executor = open_executor(execution.executor, unsafe=execution.unsafe)
    ran = executor.run("print('ran')", "", "", limits)
    if (ran.stdout.strip(), ran.status) != (b"ran", 0):
        raise SandboxError(f"a first program did not run (status {ran.status}): {ran.stderr.strip()[-500:]}")
    return 1.0


def extract_answer(response: str) -> str | None:
    """Return the program in the response after any thinking: the last fenced block that is marked as Python,
    or if none is, the last that is not marked at all. A block of sample output is no program if there is
    another block, and one that is not closed is never one. Without a fence, all of it is the program if it is
    Python."""
    answer = after_thinking(response)
    has_fence, marked, unmarked = False, list[str](), list[str]()
    for language, block in _blocks(answer):
        has_fence = True
        if block is not None and language.lower() in _PYTHON:
            (marked if language else unmarked).append(block)
    if not has_fence:
        return answer if len(answer) <= LONGEST_PROGRAM and _statements(answer) else None
    blocks = marked or unmarked
    programs = (block for block in reversed(blocks) if not _is_output(block, is_marked=bool(marked)))
    return next(programs, blocks[-1] if blocks else None)


def _is_output(block: str, *, is_marked: bool) -> bool:
    """Return whether a block can only be what a program prints: values alone or, of one that is not marked
    as Python, no Python."""
    if len(block) > LONGEST_PROGRAM:
        return False
    statements = _statements(block)
    if statements is None:
        return not is_marked
    nodes = (node for statement in statements for node in ast.walk(statement))
    are_values = all(isinstance(statement, ast.Expr) for statement in statements)
    return are_values and not any(isinstance(node, ast.Call | ast.Await) for node in nodes)


def _statements(text: str) -> list[ast.stmt] | None:
    """Return the statements of a program; None if it is no Python."""
    try:
        return ast.parse(text).body
    except _NO_PYTHON:
        return None


def _blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield (language, content) of the fenced blocks of a Markdown text; the content of an unclosed block is
    None. A block ends with a line that is only a fence like its first, at least as long."""
    lines: list[str] = []
    opened: re.Match[str] | None = None
    for line in text.split("\n"):
        if opened is None:
            opened, lines = _FENCE.fullmatch(line), []
        elif set(line.strip()) == {opened["marks"][0]} and len(line.strip()) >= len(opened["marks"]):
            block = "".join(f"{body_line}\n" for body_line in lines)
            yield opened["language"], textwrap.dedent(block) if opened["indent"] else block
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        yield opened["language"], None


def label_problem(label: str, metadata: dict[str, Any]) -> str | None:
    """Return why this label cannot be graded; None if it can."""
    try:
        read_problem(label)
    except ValueError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=256)
def read_problem(label: str) -> Problem:
    """Return the tests in a label. Raises ValueError with what is wrong with it."""
    try:
        content = json.loads(label, parse_int=long_integer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the label of a code problem must be JSON: {error}") from None
    if isinstance(content, dict) and "test" in content:
        return _asserts(content)
    if isinstance(content, dict) and "inputs" in content and "outputs" in content:
        return _pairs(content)
    raise ValueError(
        'the label of a code problem must be {"inputs": […], "outputs": […], "fn_name": optional} or '
        '{"test": SOURCE, "entry_point": NAME or null}'
    )


def _asserts(content: dict[str, Any]) -> Problem:
    test, entry_point = content["test"], content.get("entry_point")
    if not isinstance(test, str) or not isinstance(entry_point, str | None):
        raise ValueError("`test` must be Python source, and `entry_point` a name or null")
    try:
        tree = ast.parse(test)
    except _NO_PYTHON as error:
        raise ValueError(f"`test` is no Python: {str(error) or 'nested too deeply'}") from None
    if entry_point and not any(
        isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body
    ):
        raise ValueError("with an `entry_point`, `test` must define check(candidate)")
    if not entry_point and not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("`test` asserts nothing")
    return Problem(test=with_rebinding(test), entry_point=entry_point)


def _pairs(content: dict[str, Any]) -> Problem:
    inputs, outputs, function = content["inputs"], content["outputs"], content.get("fn_name")
    are_lists = isinstance(inputs, list) and isinstance(outputs, list)
    if not are_lists or len(inputs) != len(outputs) or not inputs:
        raise ValueError("`inputs` and `outputs` must be lists of the same length, of one test or more")
    tolerance = content.get("float_tolerance")
    if tolerance is not None and not (_is_real(tolerance) and 0 <= tolerance < 1):
        raise ValueError(f"`float_tolerance` must be a number from 0 to below 1, got {tolerance!r}"[:300])
    if function is None:
        return Problem(tuple(map(_text, inputs)), tuple(map(_text, outputs)), float_tolerance=tolerance)
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"`fn_name` must be the name of a function, got {function!r}")
    inputs, outputs = tuple(map(_arguments, inputs)), tuple(map(_expected, outputs))
    return Problem(inputs, outputs, function, float_tolerance=tolerance)


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"without `fn_name`, inputs and outputs must be texts, got {value!r}"[:300])
    return value


def _arguments(value: Any) -> list[Any]:
    """Return a list of arguments; a text has one argument per line."""
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise ValueError(f"with `fn_name`, an input must be a list or JSON lines, got {value!r}"[:300])
    return [_json(line) for line in value.split("\n")]


def _expected(value: Any) -> list[Any]:
    """Return the accepted results. A text is read as JSON. A list of one element may also be a list around
    the result, as in data sets derived from APPS."""
    if isinstance(value, str):
        return [_json(value)]
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_int=long_integer)
    except (ValueError, RecursionError):
        raise ValueError(f"an argument or result is no JSON: {text!r}"[:300]) from None


def _verdicts(executor: Executor, program: str, problem: Problem, settings: CodeExecution) -> Iterator[str]:
    """Yield the verdict of each test in turn: passed, failed, or time for a time limit."""
    deadline = time.monotonic() + settings.total_seconds

    def limits() -> Limits:
        seconds_left = max(0.1, deadline - time.monotonic())
        return Limits(seconds=min(settings.seconds, seconds_left), memory_bytes=settings.memory_mb << 20)

    if problem.test is not None:
        done = executor.check(program, problem.test, problem.entry_point, limits())
        yield done.reached or _verdict(done.status == 0)
        return
    first = offered_imports(program)
    tolerance = settings.float_tolerance if problem.float_tolerance is None else problem.float_tolerance
    if problem.function is not None:
        seconds_left = deadline - time.monotonic()
        calls = executor.call(program, first, problem.function, problem.inputs, limits(), seconds_left)
        for call, right in zip(calls, problem.outputs, strict=False):
            yield call.reached or _verdict(
                call.returned and any(same_result(call.result, expected, tolerance) for expected in right)
            )
        return
    for stdin, expected in zip(problem.inputs, problem.outputs, strict=True):
        done = executor.run(program, first, stdin, limits())
        output = done.stdout.decode(errors="replace")
        yield done.reached or _verdict(done.status == 0 and same_output(output, expected, tolerance))


def _verdict(is_right: bool) -> str:
    return "passed" if is_right else "failed"


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare two outputs line by line, without surrounding space, as LiveCodeBench does (grade_stdio). Lines
    that differ as text may be exactly equal as numbers. `tolerance` is the largest difference, absolute or
    relative, from an expected number that has a point or an exponent."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    return len(ours) == len(theirs) and all(
        line == expected_line or _same_words(line.split(), expected_line.split(), tolerance)
        for line, expected_line in zip(ours, theirs, strict=True)
    )


def _same_words(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    return len(ours) == len(theirs) and all(map(partial(_same_word, tolerance=tolerance), ours, theirs))


def _same_word(output: str, expected: str, tolerance: float) -> bool:
    if tolerance and output == expected:
        return True
    try:
        ours, theirs = Decimal(output), Decimal(expected)
        if ours == theirs:
            return True
    except InvalidOperation:
        return False
    return any(mark in expected for mark in ".eE") and _is_close(ours, theirs, tolerance)


def same_result(result: Any, expected: Any, tolerance: float) -> bool:
    """Compare the result of a function, as JSON values; real numbers that are expected may differ by the
    tolerance, as in `same_output`."""
    if isinstance(expected, list) and isinstance(result, list) and tolerance:
        return len(result) == len(expected) and all(
            same_result(item, expected_item, tolerance)
            for item, expected_item in zip(result, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(result, dict) and tolerance:
        return result.keys() == expected.keys() and all(
            same_result(result[key], expected[key], tolerance) for key in expected
        )
    if isinstance(expected, float) and _is_real(result):
        return bool(result == expected) or _is_close(result, expected, tolerance)
    return bool(result == expected)


def _is_close(number: float | Decimal, expected: float | Decimal, tolerance: float) -> bool:
    if not tolerance:
        return False
    try:
        difference = abs(float(number) - float(expected))
        return difference <= tolerance * max(1.0, abs(float(expected)))
    except OverflowError:  # of a large integer
        return False


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def offered_imports(program: str) -> str:
    """Return the imports that a program uses and lacks, as LiveCodeBench adds them, and the limits on
    recursion and digits. Only names in use are imported: importing all takes longer than most programs."""
    lines = ["import sys", "sys.setrecursionlimit(50000)", f"sys.set_int_max_str_digits({_MOST_DIGITS})"]
    try:
        missing = needed_names(program)
    except _NO_PYTHON:
        missing = set()
    return "\n".join([*lines, *sorted({_offered()[name] for name in missing if name in _offered()})])


@functools.cache
def _offered() -> dict[str, str]:
    """Return the map from a name to the statement that imports it."""
    offered: dict[str, str] = {}
    for name in [*_OFFERED, "typing"]:
        module = importlib.import_module(name)
        public = getattr(
            module, "__all__", [attribute for attribute in vars(module) if not attribute.startswith("_")]
        )
        offered |= {attribute: f"from {name} import {attribute}" for attribute in public}
    return offered | {name: f"import {name}" for name in _OFFERED}
