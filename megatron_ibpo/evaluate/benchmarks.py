"""Benchmarks by name: from the rows of their published files to prompts and labels.

`--eval-prompt-data aime25://PATH` reads PATH, a file or a directory of files (JSON Lines, also gzipped, a
JSON list, or parquet), as AIME 2025 is published. docs/evaluation.md lists the source of each file, its
licence and checksum. Nothing is downloaded.
"""

import base64
import binascii
import gzip
import hashlib
import io
import json
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from megatron_ibpo.basics.strict_json import read_json
from megatron_ibpo.basics.text import counted, listed
from megatron_ibpo.basics.user_files import (
    GIB,
    RECORD_BYTES,
    UserFileError,
    check_user_file,
    read_user_file,
    user_lines,
)
from megatron_ibpo.config import path_in_recipe, searched
from megatron_ibpo.data import DataError
from megatron_ibpo.data.arrow_tables import Parquet, check_footers
from megatron_ibpo.data.row_prompts import LARGEST_COMPRESSED, MOST_BRACKETS, MOST_LINES
from megatron_ibpo.data.tables import num_brackets

PAGE = "docs/evaluation.md#benchmarks"

_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_IN_A_BLOCK = "Give the whole program in one ```python block at the end."

Row = dict[str, Any]
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

        A repeated id, which two files may have, gets a number appended. Raises DataError: a row of another
        layout, or a repeated question; with file, line, the fields a row must have, and where they are
        described.
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
    """Return the label for the verifier `code`: all tests of a row, public ones first. Raises ValueError: the
    tests cannot be unpacked, or there are none; the message names the field."""
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


# -------------------------------------------------------------------------------------------------- files

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

PUBLISHED = {
    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14": "GSM8K's test.jsonl",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef": "HumanEval.jsonl.gz",
    "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132": "prm800k's math_splits/test.jsonl",
}
"""SHA-256 of published files → their names; docs/evaluation.md gives the source of each hash."""


def benchmark_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Yield (location, row) for every row; the files of a directory in the order of their names. Raises
    DataError: nothing there, or a file in another format than its name says; with file and line."""
    for file in _files(path):
        if file.suffix == ".parquet":
            yield from _of_parquet(file)
        elif file.suffix == ".json":
            yield from _of_list(file)
        else:
            yield from _of_lines(file)


def checksums(path: str) -> list[str]:
    """Return one line per file: its SHA-256, which shows whether two evaluations read the same file, and the
    published file that has it, if known. Raises DataError: nothing there."""
    lines = []
    for file in _files(path):
        with file.open("rb") as content:
            checksum = hashlib.file_digest(content, "sha256").hexdigest()
        note = f", as published: {PUBLISHED[checksum]}" if checksum in PUBLISHED else ""
        lines.append(f"{file}: SHA-256 {checksum}{note}")
    return lines


def _files(path: str) -> list[Path]:
    located = path_in_recipe(path)
    if not located.exists():
        raise DataError(f"benchmark file {located}: no such file{searched(located)}")
    if not located.is_dir():
        check_user_file(located)
    files = [located] if located.is_file() else sorted(file for file in located.rglob("*") if _is_data(file))
    if not files or not all(map(_is_data, files)):
        raise DataError(
            f"{located}: expected a file, or a directory of them, whose name ends in {', '.join(SUFFIXES)}"
        )
    return files


def _is_data(file: Path) -> bool:
    return file.is_file() and file.name.endswith(SUFFIXES)


def _of_lines(file: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            for number, line in enumerate(user_lines(opened, file), start=1):
                if number > MOST_LINES or (file.suffix == ".gz" and opened.tell() > RECORD_BYTES):
                    raise DataError(
                        f"{file}: more than {MOST_LINES:,} lines, blank ones included, or "
                        f"{RECORD_BYTES // GIB} GiB of content in a compressed file"
                    )
                if line.strip():
                    location = f"{file}, line {number}"
                    yield location, _object(_json(line, location), location)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}, after line {number}: not gzip, or cut off: {error}") from error


def _of_list(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        content = _json(read_user_file(file, LARGEST_COMPRESSED), str(file))
    except UserFileError as error:
        raise DataError(f"{error}; JSON Lines (.jsonl), which are read one by one, may have more") from None
    if not isinstance(content, list):
        raise DataError(f"{file}: expected a JSON list of objects, found {type(content).__name__}")
    for number, row in enumerate(content):
        location = f"{file}, item {number}"
        yield location, _object(row, location)


def _of_parquet(file: Path) -> Iterator[tuple[str, Row]]:
    check_footers([file])
    table = Parquet(file)
    for block in range(table.num_blocks):
        for number in range(table.count(block)):
            location = table.location(block, number)
            try:
                yield location, table.row(block, number)
            except DataError as error:
                raise DataError(f"{location}: {error}") from None


def _json(text: bytes, location: str) -> Any:
    if num_brackets(text) > MOST_BRACKETS:
        raise DataError(f"{location}: more than {MOST_BRACKETS:,} brackets")
    try:
        return read_json(text)
    except ValueError as error:
        raise DataError(f"{location}: not JSON: {error}") from error


def _object(row: Any, location: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{location}: expected a JSON object, found {type(row).__name__}")
    return row
