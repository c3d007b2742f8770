"""Benchmarks by name: from the rows of their published files to prompts and labels.

`--eval-prompt-data aime25://PATH` reads PATH, a file or a directory of files, as AIME 2025 is published.
docs/evaluation.md lists the source of each file, its licence and checksum. Nothing is downloaded.
"""

import base64
import binascii
import io
import json
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import counted, listed
from megatron_ibpo.data import DataError
from megatron_ibpo.evaluate.benchmark_files import Row, benchmark_rows

PAGE = "docs/evaluation.md#benchmarks"

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_IN_A_BLOCK = "Give the whole program in one ```python block at the end."

ParsedRow = tuple[str | None, str, str]
"""(id, or None if the layout has none; question; label)"""


@dataclass(frozen=True)
class Benchmark:
    """The layout of one benchmark's files and the settings for its prompts."""

    title: str
    layout: str
    """The fields of a row, in words."""
    row: Callable[[Row], ParsedRow | None]
    """Returns the question of a row; None outside the benchmark. Raises ValueError for another layout."""
    rm_type: Literal["math", "code"]
    problems: int | None
    """Number of published problems; None if not known for sure."""
    samples: int
    """Responses per problem, if no flag or preset sets it."""


@dataclass
class BenchmarkRows:
    """The rows of a benchmark's file, with counts for notes once they are read."""

    benchmark: Benchmark
    name: str
    path: str
    read: int = 0
    outside: int = 0

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (location, row) with prompt, label, task, id and metadata, in the form that `prompts_of_rows`
        takes.

        A repeated id, which two files may have, gets a number appended.

        Raises:
            DataError: a row of another layout, or a repeated question; with file, line, the fields a row must
                have, and where they are described.
        """
        places: dict[str, str] = {}
        names: Counter[str] = Counter()
        for location, row in benchmark_rows(self.path):
            try:
                parsed = self.benchmark.row(row)
            except ValueError as error:
                raise DataError(
                    f"{location}: {error}. A row of {self.benchmark.title} has {self.benchmark.layout} (found"
                    f": {listed([repr(name)[:40] for name in row], most=20) or 'nothing'}); see {PAGE}"
                ) from None
            if parsed is None:
                self.outside += 1
                continue
            own_id, question, label = parsed
            if (first := places.setdefault(question, location)) is not location:
                raise DataError(f"{location}: repeats the problem at {first}; see {PAGE}")
            problem = str(self.read) if own_id is None else own_id
            names[problem] += 1
            if names[problem] > 1:
                problem = f"{problem}-{names[problem]}"
            self.read += 1
            yield (
                location,
                {
                    "prompt": question,
                    "label": label,
                    "task": self.name,
                    "id": problem,
                    "metadata": {"id": problem, "rm_type": self.benchmark.rm_type},
                },
            )

    def notes(self) -> list[str]:
        notes = []
        if self.outside:
            notes.append(
                f"{self.name}: {counted(self.outside, 'row')} outside of {self.benchmark.title} left out"
            )
        if self.benchmark.problems not in (None, self.read):
            notes.append(
                f"{self.name}: {counted(self.read, 'problem')} in {self.path}; published are "
                f"{self.benchmark.problems}"
            )
        return notes


# ------------------------------------------------------------------------------------------------ layouts


def _competition(row: Row) -> ParsedRow:
    """Parse AIME and HMMT in the layouts of several publishers."""
    question = _text_of_any(row, ("problem", "question"))
    problem = next((str(row[name]) for name in ("problem_idx", "id") if name in row), None)
    return problem, _boxed(question), _answer(row)


def _math_500(row: Row) -> ParsedRow:
    question = _text(row, "problem")
    return _text(row, "unique_id"), _boxed(question), _answer(row)


def _gsm8k(row: Row) -> ParsedRow:
    question, solution = _text(row, "question"), _text(row, "answer")
    _, mark, final = solution.rpartition("####")
    if not mark or not final.strip():
        raise ValueError("field 'answer' has no '#### ' with the final answer after it")
    return None, _boxed(question), final.strip().replace(",", "")


def _humaneval(row: Row) -> ParsedRow:
    code, test, entry = (_text(row, name) for name in ("prompt", "test", "entry_point"))
    question = f"Complete this Python function. {_IN_A_BLOCK}\n\n```python\n{code.rstrip()}\n```"
    return _text(row, "task_id"), question, json.dumps({"test": test, "entry_point": entry})


def _mbpp(row: Row) -> ParsedRow | None:
    number = row.get("task_id")
    if type(number) is not int:
        raise ValueError("field 'task_id' must be a whole number")
    task = _text_of_any(row, ("text", "prompt"))
    tests = _texts(row, "test_list")
    setup = [row["test_setup_code"]] if row.get("test_setup_code") else list(row.get("test_imports") or [])
    if not 11 <= number <= 510:
        return None
    examples = "\n".join(tests)
    question = f"{task}\n\nYour code must pass these tests:\n\n```python\n{examples}\n```\n\n{_IN_A_BLOCK}"
    label = {"test": "\n".join([*setup, *tests]), "entry_point": None}
    return f"mbpp/{number}", question, json.dumps(label)


def _livecodebench(row: Row) -> ParsedRow | None:
    question, problem = _text(row, "question_content"), _text(row, "question_id")
    day = date.fromisoformat(str(row.get("contest_date"))[:10])  # a date in parquet, its text in JSON
    if not FIRST_DAY <= day <= LAST_DAY:
        return None
    label = code_label(row)
    if starter := row.get("starter_code"):
        instruction = f"Complete this Python code. {_IN_A_BLOCK}\n\n```python\n{starter.rstrip()}\n```"
    else:
        instruction = "Write a Python program that reads the input from stdin and prints the output. "
        instruction += _IN_A_BLOCK
    return problem, f"{question.rstrip()}\n\n{instruction}", label


_COMPETITION = (
    "'problem' or 'question' (text), 'answer' (text or a whole number), optionally 'problem_idx' or 'id'"
)

BENCHMARKS = {
    "aime25": Benchmark("AIME 2025", _COMPETITION, _competition, "math", 30, 64),
    "hmmt25": Benchmark("HMMT February 2025", _COMPETITION, _competition, "math", 30, 64),
    "math500": Benchmark(
        "MATH-500", "'problem', 'answer' and 'unique_id' (texts)", _math_500, "math", 500, 4
    ),
    "gsm8k": Benchmark(
        "GSM8K's test set",
        "'question' and 'answer' (texts), the final answer after '#### '",
        _gsm8k,
        "math",
        1319,
        1,
    ),
    "livecodebench_v6": Benchmark(
        "LiveCodeBench v6, 2025-02 to 2025-05",
        "'question_id', 'question_content', 'contest_date', 'starter_code', 'metadata', 'public_test_cases' "
        "and 'private_test_cases' (texts)",
        _livecodebench,
        "code",
        None,
        64,
    ),
    "humaneval": Benchmark(
        "HumanEval", "'task_id', 'prompt', 'test' and 'entry_point' (texts)", _humaneval, "code", 164, 8
    ),
    "mbpp": Benchmark(
        "MBPP's test set, task_id 11 to 510",
        "'task_id' (a whole number), 'text' or 'prompt' (text) and 'test_list' (texts), optionally "
        "'test_setup_code' or 'test_imports'",
        _mbpp,
        "code",
        None,  # 500, and 257 of them in the sanitized file
        8,
    ),
}
"""Scheme of --eval-prompt-data → benchmark."""


# ------------------------------------------------------------------------------------------------- fields


def _text(row: Row, name: str) -> str:
    if not isinstance(row.get(name), str) or not row[name].strip():
        raise ValueError(f"field {name!r} must be a text")
    value: str = row[name]
    return value


def _texts(row: Row, name: str) -> list[str]:
    value = row.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"field {name!r} must be a list of texts")
    return value


def _text_of_any(row: Row, names: tuple[str, ...]) -> str:
    return _text(row, next((name for name in names if name in row), names[0]))


def _answer(row: Row) -> str:
    value = row.get("answer")
    if type(value) not in (str, int, float) or not str(value).strip():
        raise ValueError("field 'answer' must be a text or a number")
    return str(value).strip()


def _boxed(question: str) -> str:
    return f"{question.rstrip()}\n\n{_BOXED}"


# ------------------------------------------------- LiveCodeBench's rows (arXiv 2403.07974), with packed tests

FIRST_DAY, LAST_DAY = date(2025, 2, 1), date(2025, 5, 31)
"""First and last contest_date of the window 25.02-25.05."""
_MOST_BYTES = 2**28
"""Limit of one problem's private tests in bytes, unpacked. It is far more than any problem has; a small file
could expand to more."""


def code_label(row: dict[str, Any]) -> str:
    """Return the label for the verifier `code`: all tests of a row, public ones first.

    Raises:
        ValueError: the tests cannot be unpacked, or there are none; the message names the field.
    """
    tests = [*_tests(row, "public_test_cases"), *_tests(row, "private_test_cases")]
    if not tests:
        raise ValueError("it has no tests")
    label: dict[str, Any] = {
        "inputs": [test["input"] for test in tests],
        "outputs": [test["output"] for test in tests],
    }
    if (name := function_name(row)) is not None:
        label["fn_name"] = name
    return json.dumps(label)


def function_name(row: dict[str, Any]) -> str | None:
    """Return the name of the method that the tests call; None if they use stdin. Raises ValueError."""
    try:
        metadata = read_json(row.get("metadata", ""))
        name = metadata.get("func_name")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"field 'metadata' must be the text of a JSON object: {error}") from None
    return name or None


def _tests(row: dict[str, Any], field: str) -> list[dict[str, str]]:
    try:
        tests = read_json(_json_text(row[field]))
    except KeyError:
        raise ValueError(f"no field {field!r}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"field {field!r}: its tests cannot be read: {error}") from None
    fine = isinstance(tests, list) and all(
        isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
        for test in tests
    )
    if not fine:
        raise ValueError(f"field {field!r} must be a list of objects with texts 'input' and 'output'")
    return tests


def _json_text(packed: str) -> str:
    """Return JSON text that is given as it is, or as base64 of zlib of a pickle of it."""
    if packed.lstrip().startswith("["):
        return packed
    try:
        content = _unzipped(base64.b64decode(packed, validate=True))
        text = _TextUnpickler(io.BytesIO(content)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
        raise ValueError(f"neither JSON nor base64 of zlib of a pickled text: {error}") from None
    if isinstance(text, bytes):
        return text.decode()
    if not isinstance(text, str):
        raise ValueError(f"its pickle holds a {type(text).__name__}, where a text must be")
    return text


def _unzipped(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(data, _MOST_BYTES)
    if stream.unconsumed_tail:
        raise ValueError(f"unpacked it has more than {_MOST_BYTES:,} bytes")
    if not stream.eof:
        raise ValueError("it is cut off")
    return content


class _TextUnpickler(pickle.Unpickler):
    """An unpickler for texts only. Other pickles may run code through the names they look up, so every lookup
    is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only a text may be in it")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside, and only a text may be in it")
