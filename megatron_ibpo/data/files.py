"""Files and directories of rows: which files to read, and whether they are small enough to read whole."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from megatron_ibpo.basics.user_files import check_user_file, read_json_object
from megatron_ibpo.config import nearest, searched
from megatron_ibpo.data.arrow_tables import ArrowFile, Parquet, check_footers
from megatron_ibpo.data.row_prompts import (
    LARGEST_COMPRESSED,
    Budget,
    LazyRow,
    read_jsonl,
)
from megatron_ibpo.data.tables import Files, JsonLines, Table
from megatron_ibpo.data.tokenizer import DataError

SMALL_ROWS = 8192
"""Rows up to which a source is read and checked whole before the run starts."""
SMALL_BYTES = 64 * 1024**2
LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*LINES, ".parquet", ".arrow")
T = TypeVar("T")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
HELD_OUT = ("test", "validation", "eval", "dev", "held_out")
"""Names of a held-out part, in the order in which they are tried."""


def chosen_files(path: Path, role: str, split: str | None) -> list[Path]:
    """Return the files to read, in order.

    Args:
        path: a file; or a directory, as `datasets` saves it or as the Hugging Face hub lays it out.
        role: "train" or "eval".
        split: part of a directory, by name; None: the role decides.

    Raises:
        DataError: there is nothing there, or the part is missing or ambiguous.
    """
    if not path.exists():
        raise DataError(f"prompt file {path}: no such file{searched(path)}")
    if not path.is_dir():
        check_user_file(path)
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
        return [path]
    is_dict = (path / "dataset_dict.json").exists()
    if not is_dict and not (path / "state.json").exists():
        return _files_by_name(path, role, split)
    if is_dict:
        parts = {name: path / name for name in _names_in(path / "dataset_dict.json", "splits")}
        path = _part(parts, path, role, split)
    return _saved_files(path)


def open_table(files: Sequence[Path], columns: Sequence[str]) -> Table | None:
    """Open the rows of large files as one table. Return None for files that are small enough to be read and
    checked whole, as `each_row` does under a budget. Raises DataError if a file is damaged or of another
    format, or if files that must be read whole are too large."""
    size = sum(file.stat().st_size for file in files)
    if any(file.name.endswith(".gz") for file in files):
        if size > LARGEST_COMPRESSED:
            raise DataError(
                f"{files[0].parent}: more than {LARGEST_COMPRESSED // 1024**2} MiB, with compressed files, "
                "which are read whole; `gunzip`"
            )
        return None
    check_footers(files)
    tables = [_table(file, columns) for file in files]
    table = tables[0] if len(tables) == 1 else Files(tables)
    rows = accumulate(map(table.count, range(table.num_blocks)))
    return None if size <= SMALL_BYTES and all(count <= SMALL_ROWS for count in rows) else table


def _table(file: Path, columns: Sequence[str]) -> Table:
    if file.suffix == ".parquet":
        return Parquet(file, columns)
    if file.suffix == ".arrow":
        return ArrowFile(file, columns)
    return JsonLines(file)


def each_row(
    files: Sequence[Path], columns: Sequence[str], budget: Budget | None = None
) -> Iterator[LazyRow]:
    """Yield the rows of all files in order, whatever their size.

    Args:
        budget: limits on the lines of JSONL files, which are then read in one go; None: none for plain files,
            and the usual ones for each compressed file.
    """
    for file in files:
        if file.name.endswith(".gz" if budget is None else LINES):
            yield from read_jsonl(file, budget)
            continue
        table = _table(file, columns)
        for block in range(table.num_blocks):
            for number in range(table.count(block)):
                yield partial(table.location, block, number), partial(table.row, block, number)


def _part(parts: Mapping[str, T], path: Path, role: str, split: str | None) -> T:
    """Return the part of a directory for a role and split."""
    candidates = [split] if split is not None else ["train"] if role == "train" else list(HELD_OUT)
    for name in candidates:
        if name in parts:
            return parts[name]
    missing = f"no part {split!r}{nearest(split, parts)}" if split is not None else f"no part for {role}"
    raise DataError(f"{path}: {missing}; it has {', '.join(parts)}; ?split=NAME chooses one")


def _files_by_name(directory: Path, role: str, split: str | None) -> list[Path]:
    """Return the files of one part of a directory; their names say which part they belong to."""
    parts: dict[str, list[Path]] = {}
    for file in sorted(file for file in directory.rglob("*") if file.name.endswith(SUFFIXES)):
        parts.setdefault(_split_of(file, directory), []).append(file)
    if not parts:
        raise DataError(f"{directory}: holds no data set: no file that ends in {', '.join(SUFFIXES)}")
    files = next(iter(parts.values()))
    if split is not None or len(parts) > 1:
        files = _part(parts, directory, role, split)
    for file in files:
        check_user_file(file)
    if len(folders := {file.parent for file in files}) > 1:
        raise DataError(
            f"{directory}: several data sets ({', '.join(sorted(map(str, folders)))}); name one of them"
        )
    return files


def _saved_files(path: Path) -> list[Path]:
    """Return the files of one data set that `datasets` saved."""
    state = path / "state.json"
    if not state.exists():
        raise DataError(f"{path}: holds no state.json, as `save_to_disk` writes it")
    content = read_json_object(state, DataError)
    if content.get("_indices_data_files"):
        raise DataError(
            f"{path}: was saved after select() or shuffle(), with its rows elsewhere; "
            "flatten_indices() before save_to_disk()"
        )
    files = content.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(f, dict) and "filename" in f for f in files):
        raise DataError(f"{state}: lacks _data_files, as `save_to_disk` writes it")
    paths = [path / str(file["filename"]) for file in files]
    for file in paths:
        if not file.is_file():
            raise DataError(f"{file}: is missing, and {state} names it")
    return paths


def _names_in(path: Path, key: str) -> list[str]:
    names = read_json_object(path, DataError).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: lacks a list of {key}")
    return names


def _split_of(file: Path, root: Path) -> str:
    """Return the split in a file's name: train for data/train-00000-of-00002.parquet, train.jsonl and
    train/a.parquet."""
    stem = next(file.name.removesuffix(suffix) for suffix in SUFFIXES if file.name.endswith(suffix))
    stem = _SHARD.sub("", stem)
    splits = ("train", *HELD_OUT)
    if stem in splits or file.parent == root or file.parent.name not in splits:
        return stem
    return file.parent.name
