"""Rows of benchmark files as they are published: JSON Lines (also gzipped), a JSON list, parquet, or a
directory of such files."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ibpo.basics.strict_json import read_json
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

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

PUBLISHED = {
    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14": "GSM8K's test.jsonl",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef": "HumanEval.jsonl.gz",
    "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132": "prm800k's math_splits/test.jsonl",
}
"""SHA-256 of published files → their names; docs/evaluation.md gives the source of each hash."""

Row = dict[str, Any]


def benchmark_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Yield (location, row) for every row; the files of a directory in the order of their names.

    Raises:
        DataError: nothing there, or a file in another format than its name says; with file and line.
    """
    for file in _files(path):
        if file.suffix == ".parquet":
            yield from _of_parquet(file)
        elif file.suffix == ".json":
            yield from _of_list(file)
        else:
            yield from _of_lines(file)


def checksums(path: str) -> list[str]:
    """Return one line per file: its SHA-256, which shows whether two evaluations read the same file, and the
    published file that has it, if known.

    Raises:
        DataError: nothing there.
    """
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
